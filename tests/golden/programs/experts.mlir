builtin.module {
  func.func @step(%model.embed_tokens.weight: tensor<64x32xf32> {dist.kind = "param", dist.name = "model.embed_tokens.weight"}, %model.layers.0.self_attn.q_proj.weight: tensor<32x32xf32> {dist.kind = "param", dist.name = "model.layers.0.self_attn.q_proj.weight"}, %model.layers.0.self_attn.k_proj.weight: tensor<16x32xf32> {dist.kind = "param", dist.name = "model.layers.0.self_attn.k_proj.weight"}, %model.layers.0.self_attn.v_proj.weight: tensor<16x32xf32> {dist.kind = "param", dist.name = "model.layers.0.self_attn.v_proj.weight"}, %model.layers.0.self_attn.o_proj.weight: tensor<32x32xf32> {dist.kind = "param", dist.name = "model.layers.0.self_attn.o_proj.weight"}, %model.layers.0.mlp.gate.weight: tensor<4x32xf32> {dist.kind = "param", dist.name = "model.layers.0.mlp.gate.weight"}, %model.layers.0.mlp.experts.gate_up_proj: tensor<4x128x32xf32> {dist.kind = "param", dist.name = "model.layers.0.mlp.experts.gate_up_proj"}, %model.layers.0.mlp.experts.down_proj: tensor<4x32x64xf32> {dist.kind = "param", dist.name = "model.layers.0.mlp.experts.down_proj"}, %model.layers.0.input_layernorm.weight: tensor<32xf32> {dist.kind = "param", dist.name = "model.layers.0.input_layernorm.weight"}, %model.layers.0.post_attention_layernorm.weight: tensor<32xf32> {dist.kind = "param", dist.name = "model.layers.0.post_attention_layernorm.weight"}, %model.norm.weight: tensor<32xf32> {dist.kind = "param", dist.name = "model.norm.weight"}, %lm_head.weight: tensor<64x32xf32> {dist.kind = "param", dist.name = "lm_head.weight"}, %model.rotary_emb.inv_freq: tensor<4xf32> {dist.kind = "buffer", dist.name = "model.rotary_emb.inv_freq"}, %input_ids: tensor<8x4xi64> {dist.kind = "input", dist.name = "input_ids"}, %labels: tensor<8x4xi64> {dist.kind = "input", dist.name = "labels"}, %tangent: tensor<f32> {dist.kind = "tangent", dist.name = "loss"}) -> (tensor<f32> {dist.kind = "output", dist.name = "0"}, tensor<64x32xf32> {dist.kind = "grad", dist.name = "model.embed_tokens.weight"}, tensor<32x32xf32> {dist.kind = "grad", dist.name = "model.layers.0.self_attn.q_proj.weight"}, tensor<16x32xf32> {dist.kind = "grad", dist.name = "model.layers.0.self_attn.k_proj.weight"}, tensor<16x32xf32> {dist.kind = "grad", dist.name = "model.layers.0.self_attn.v_proj.weight"}, tensor<32x32xf32> {dist.kind = "grad", dist.name = "model.layers.0.self_attn.o_proj.weight"}, tensor<4x32xf32> {dist.kind = "grad", dist.name = "model.layers.0.mlp.gate.weight"}, tensor<4x128x32xf32> {dist.kind = "grad", dist.name = "model.layers.0.mlp.experts.gate_up_proj"}, tensor<4x32x64xf32> {dist.kind = "grad", dist.name = "model.layers.0.mlp.experts.down_proj"}, tensor<32xf32> {dist.kind = "grad", dist.name = "model.layers.0.input_layernorm.weight"}, tensor<32xf32> {dist.kind = "grad", dist.name = "model.layers.0.post_attention_layernorm.weight"}, tensor<32xf32> {dist.kind = "grad", dist.name = "model.norm.weight"}, tensor<64x32xf32> {dist.kind = "grad", dist.name = "lm_head.weight"}) {
    %embedding = aten.embedding(%model.embed_tokens.weight, %input_ids) {layer = "model.embed_tokens", phase = forward} : tensor<8x4x32xf32>
    %arange = aten.arange.start_step(start = 0) {layer = "model", phase = forward} : tensor<4xi64>
    %view = aten.view(%arange) {layer = "model.rotary_emb", phase = forward} : tensor<1x4x1xi64>
    %_to_copy = aten._to_copy(%view) {layer = "model.rotary_emb", phase = forward} : tensor<1x4x1xf32>
    %mul = aten.mul.Tensor(%_to_copy, %model.rotary_emb.inv_freq) {layer = "model.rotary_emb", phase = forward} : tensor<1x4x4xf32>
    %cat = aten.cat([%mul, %mul], dim = 2) {layer = "model.rotary_emb", phase = forward} : tensor<1x4x8xf32>
    %cos = aten.cos(%cat) {layer = "model.rotary_emb", phase = forward} : tensor<1x4x8xf32>
    %sin = aten.sin(%cat) {layer = "model.rotary_emb", phase = forward} : tensor<1x4x8xf32>
    %pow.1 = aten.pow.Tensor_Scalar(%embedding, exponent = 2) {layer = "model.layers.0.input_layernorm", phase = forward} : tensor<8x4x32xf32>
    %sum = aten.sum.dim_IntList(%pow.1, dim = [2], keepdim = true) {layer = "model.layers.0.input_layernorm", phase = forward} : tensor<8x4x1xf32>
    %div = aten.div.Scalar(%sum, other = 32) {layer = "model.layers.0.input_layernorm", phase = forward} : tensor<8x4x1xf32>
    %add.1 = aten.add.Scalar(%div, other = 1.0e-05) {layer = "model.layers.0.input_layernorm", phase = forward} : tensor<8x4x1xf32>
    %rsqrt = aten.rsqrt(%add.1) {layer = "model.layers.0.input_layernorm", phase = forward} : tensor<8x4x1xf32>
    %mul.3 = aten.mul.Tensor(%embedding, %rsqrt) {layer = "model.layers.0.input_layernorm", phase = forward} : tensor<8x4x32xf32>
    %mul.4 = aten.mul.Tensor(%model.layers.0.input_layernorm.weight, %mul.3) {layer = "model.layers.0.input_layernorm", phase = forward} : tensor<8x4x32xf32>
    %permute = aten.permute(%model.layers.0.self_attn.q_proj.weight, dims = [1, 0]) {layer = "model.layers.0.self_attn.q_proj", phase = forward} : tensor<32x32xf32>
    %view_1 = aten.view(%mul.4) {layer = "model.layers.0.self_attn.q_proj", phase = forward} : tensor<32x32xf32>
    %mm = aten.mm(%view_1, %permute) {layer = "model.layers.0.self_attn.q_proj", phase = forward} : tensor<32x32xf32>
    %view.1 = aten.view(%mm) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x4x4x8xf32>
    %permute_1 = aten.permute(%view.1, dims = [0, 2, 1, 3]) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x4x4x8xf32>
    %permute_2 = aten.permute(%model.layers.0.self_attn.k_proj.weight, dims = [1, 0]) {layer = "model.layers.0.self_attn.k_proj", phase = forward} : tensor<32x16xf32>
    %view.2 = aten.view(%mul.4) {layer = "model.layers.0.self_attn.k_proj", phase = forward} : tensor<32x32xf32>
    %mm.1 = aten.mm(%view.2, %permute_2) {layer = "model.layers.0.self_attn.k_proj", phase = forward} : tensor<32x16xf32>
    %view.3 = aten.view(%mm.1) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x4x2x8xf32>
    %permute_3 = aten.permute(%view.3, dims = [0, 2, 1, 3]) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x2x4x8xf32>
    %permute_4 = aten.permute(%model.layers.0.self_attn.v_proj.weight, dims = [1, 0]) {layer = "model.layers.0.self_attn.v_proj", phase = forward} : tensor<32x16xf32>
    %view.4 = aten.view(%mul.4) {layer = "model.layers.0.self_attn.v_proj", phase = forward} : tensor<32x32xf32>
    %mm.2 = aten.mm(%view.4, %permute_4) {layer = "model.layers.0.self_attn.v_proj", phase = forward} : tensor<32x16xf32>
    %view.5 = aten.view(%mm.2) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x4x2x8xf32>
    %permute_5 = aten.permute(%view.5, dims = [0, 2, 1, 3]) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x2x4x8xf32>
    %view_2 = aten.view(%cos) {layer = "model.layers.0.self_attn", phase = forward} : tensor<1x1x4x8xf32>
    %view_3 = aten.view(%sin) {layer = "model.layers.0.self_attn", phase = forward} : tensor<1x1x4x8xf32>
    %mul.5 = aten.mul.Tensor(%permute_1, %view_2) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x4x4x8xf32>
    %slice.1 = aten.slice.Tensor(%permute_1, dim = 3, start = 0) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x4x4x4xf32>
    %slice.2 = aten.slice.Tensor(%permute_1, dim = 3, start = 4) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x4x4x4xf32>
    %neg = aten.neg(%slice.2) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x4x4x4xf32>
    %cat.1 = aten.cat([%neg, %slice.1], dim = 3) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x4x4x8xf32>
    %mul.6 = aten.mul.Tensor(%cat.1, %view_3) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x4x4x8xf32>
    %add.2 = aten.add.Tensor(%mul.5, %mul.6) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x4x4x8xf32>
    %mul.7 = aten.mul.Tensor(%permute_3, %view_2) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x2x4x8xf32>
    %slice.3 = aten.slice.Tensor(%permute_3, dim = 3, start = 0) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x2x4x4xf32>
    %slice.4 = aten.slice.Tensor(%permute_3, dim = 3, start = 4) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x2x4x4xf32>
    %neg.1 = aten.neg(%slice.4) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x2x4x4xf32>
    %cat.2 = aten.cat([%neg.1, %slice.3], dim = 3) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x2x4x8xf32>
    %mul.8 = aten.mul.Tensor(%cat.2, %view_3) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x2x4x8xf32>
    %add.3 = aten.add.Tensor(%mul.7, %mul.8) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x2x4x8xf32>
    %_scaled_dot_product_flash_attention_for_cpu, %_scaled_dot_product_flash_attention_for_cpu_1 = aten._scaled_dot_product_flash_attention_for_cpu(%add.2, %add.3, %permute_5, is_causal = true, scale = 0.3535533905932738) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x4x4x8xf32>, tensor<8x4x4xf32>
    %permute_6 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu, dims = [0, 2, 1, 3]) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x4x4x8xf32>
    %permute_7 = aten.permute(%model.layers.0.self_attn.o_proj.weight, dims = [1, 0]) {layer = "model.layers.0.self_attn.o_proj", phase = forward} : tensor<32x32xf32>
    %view.8 = aten.view(%permute_6) {layer = "model.layers.0.self_attn.o_proj", phase = forward} : tensor<32x32xf32>
    %mm.3 = aten.mm(%view.8, %permute_7) {layer = "model.layers.0.self_attn.o_proj", phase = forward} : tensor<32x32xf32>
    %view_4 = aten.view(%mm.3) {layer = "model.layers.0.self_attn.o_proj", phase = forward} : tensor<8x4x32xf32>
    %add.4 = aten.add.Tensor(%embedding, %view_4) {layer = "model.layers.0", phase = forward} : tensor<8x4x32xf32>
    %pow.2 = aten.pow.Tensor_Scalar(%add.4, exponent = 2) {layer = "model.layers.0.post_attention_layernorm", phase = forward} : tensor<8x4x32xf32>
    %sum_1 = aten.sum.dim_IntList(%pow.2, dim = [2], keepdim = true) {layer = "model.layers.0.post_attention_layernorm", phase = forward} : tensor<8x4x1xf32>
    %div_1 = aten.div.Scalar(%sum_1, other = 32) {layer = "model.layers.0.post_attention_layernorm", phase = forward} : tensor<8x4x1xf32>
    %add.5 = aten.add.Scalar(%div_1, other = 1.0e-05) {layer = "model.layers.0.post_attention_layernorm", phase = forward} : tensor<8x4x1xf32>
    %rsqrt.1 = aten.rsqrt(%add.5) {layer = "model.layers.0.post_attention_layernorm", phase = forward} : tensor<8x4x1xf32>
    %mul.9 = aten.mul.Tensor(%add.4, %rsqrt.1) {layer = "model.layers.0.post_attention_layernorm", phase = forward} : tensor<8x4x32xf32>
    %mul.10 = aten.mul.Tensor(%model.layers.0.post_attention_layernorm.weight, %mul.9) {layer = "model.layers.0.post_attention_layernorm", phase = forward} : tensor<8x4x32xf32>
    %view.9 = aten.view(%mul.10) {layer = "model.layers.0.mlp", phase = forward} : tensor<32x32xf32>
    %view.10 = aten.view(%mul.10) {layer = "model.layers.0.mlp.gate", phase = forward} : tensor<32x32xf32>
    %permute_8 = aten.permute(%model.layers.0.mlp.gate.weight, dims = [1, 0]) {layer = "model.layers.0.mlp.gate", phase = forward} : tensor<32x4xf32>
    %mm.4 = aten.mm(%view.10, %permute_8) {layer = "model.layers.0.mlp.gate", phase = forward} : tensor<32x4xf32>
    %_softmax = aten._softmax(%mm.4, dim = -1, half_to_float = false) {layer = "model.layers.0.mlp.gate", phase = forward} : tensor<32x4xf32>
    %topk, %topk_1 = aten.topk(%_softmax, k = 2) {layer = "model.layers.0.mlp.gate", phase = forward} : tensor<32x2xf32>, tensor<32x2xi64>
    %sum.1 = aten.sum.dim_IntList(%topk, dim = [1], keepdim = true) {layer = "model.layers.0.mlp.gate", phase = forward} : tensor<32x1xf32>
    %div_2 = aten.div.Tensor(%topk, %sum.1) {layer = "model.layers.0.mlp.gate", phase = forward} : tensor<32x2xf32>
    %permute_9 = aten.permute(%model.layers.0.mlp.experts.down_proj, dims = [0, 2, 1]) {layer = "model.layers.0.mlp.experts", phase = forward} : tensor<4x64x32xf32>
    %full = aten.full(fill_value = 0.0) {layer = "model.layers.0.mlp.experts", phase = forward} : tensor<32x4xf32>
    %scatter_add = aten.scatter_add(%full, %topk_1, %div_2, dim = 1) {layer = "model.layers.0.mlp.experts", phase = forward} : tensor<32x4xf32>
    %permute_10 = aten.permute(%model.layers.0.mlp.experts.gate_up_proj, dims = [2, 0, 1]) {layer = "model.layers.0.mlp.experts", phase = forward} : tensor<32x4x128xf32>
    %view.11 = aten.view(%permute_10) {layer = "model.layers.0.mlp.experts", phase = forward} : tensor<32x512xf32>
    %mm.5 = aten.mm(%view.9, %view.11) {layer = "model.layers.0.mlp.experts", phase = forward} : tensor<32x512xf32>
    %view.12 = aten.view(%mm.5) {layer = "model.layers.0.mlp.experts", phase = forward} : tensor<32x4x128xf32>
    %slice = aten.slice.Tensor(%view.12, dim = 2, start = 0) {layer = "model.layers.0.mlp.experts", phase = forward} : tensor<32x4x64xf32>
    %slice_1 = aten.slice.Tensor(%view.12, dim = 2, start = 64) {layer = "model.layers.0.mlp.experts", phase = forward} : tensor<32x4x64xf32>
    %silu = aten.silu(%slice) {layer = "model.layers.0.mlp.experts.act_fn", phase = forward} : tensor<32x4x64xf32>
    %mul.11 = aten.mul.Tensor(%silu, %slice_1) {layer = "model.layers.0.mlp.experts", phase = forward} : tensor<32x4x64xf32>
    %view_5 = aten.view(%scatter_add) {layer = "model.layers.0.mlp.experts", phase = forward} : tensor<32x4x1xf32>
    %mul.12 = aten.mul.Tensor(%mul.11, %view_5) {layer = "model.layers.0.mlp.experts", phase = forward} : tensor<32x4x64xf32>
    %view.13 = aten.view(%mul.12) {layer = "model.layers.0.mlp.experts", phase = forward} : tensor<32x256xf32>
    %view_6 = aten.view(%permute_9) {layer = "model.layers.0.mlp.experts", phase = forward} : tensor<256x32xf32>
    %mm.6 = aten.mm(%view.13, %view_6) {layer = "model.layers.0.mlp.experts", phase = forward} : tensor<32x32xf32>
    %view.14 = aten.view(%mm.6) {layer = "model.layers.0.mlp", phase = forward} : tensor<8x4x32xf32>
    %add.6 = aten.add.Tensor(%add.4, %view.14) {layer = "model.layers.0", phase = forward} : tensor<8x4x32xf32>
    %pow.3 = aten.pow.Tensor_Scalar(%add.6, exponent = 2) {layer = "model.norm", phase = forward} : tensor<8x4x32xf32>
    %sum_2 = aten.sum.dim_IntList(%pow.3, dim = [2], keepdim = true) {layer = "model.norm", phase = forward} : tensor<8x4x1xf32>
    %div_3 = aten.div.Scalar(%sum_2, other = 32) {layer = "model.norm", phase = forward} : tensor<8x4x1xf32>
    %add.7 = aten.add.Scalar(%div_3, other = 1.0e-05) {layer = "model.norm", phase = forward} : tensor<8x4x1xf32>
    %rsqrt.2 = aten.rsqrt(%add.7) {layer = "model.norm", phase = forward} : tensor<8x4x1xf32>
    %mul.13 = aten.mul.Tensor(%add.6, %rsqrt.2) {layer = "model.norm", phase = forward} : tensor<8x4x32xf32>
    %mul.14 = aten.mul.Tensor(%model.norm.weight, %mul.13) {layer = "model.norm", phase = forward} : tensor<8x4x32xf32>
    %permute_11 = aten.permute(%lm_head.weight, dims = [1, 0]) {layer = "lm_head", phase = forward} : tensor<32x64xf32>
    %view.15 = aten.view(%mul.14) {layer = "lm_head", phase = forward} : tensor<32x32xf32>
    %mm.7 = aten.mm(%view.15, %permute_11) {layer = "lm_head", phase = forward} : tensor<32x64xf32>
    %constant_pad_nd = aten.constant_pad_nd(%labels, pad = [0, 1], value = -100.0) {layer = "", phase = forward} : tensor<8x5xi64>
    %slice.5 = aten.slice.Tensor(%constant_pad_nd, dim = 1, start = 1) {layer = "", phase = forward} : tensor<8x4xi64>
    %amax = aten.amax(%mm.7, dim = [1], keepdim = true) {layer = "", phase = forward} : tensor<32x1xf32>
    %sub = aten.sub.Tensor(%mm.7, %amax) {layer = "", phase = forward} : tensor<32x64xf32>
    %exp = aten.exp(%sub) {layer = "", phase = forward} : tensor<32x64xf32>
    %sum_3 = aten.sum.dim_IntList(%exp, dim = [1], keepdim = true) {layer = "", phase = forward} : tensor<32x1xf32>
    %_log_softmax = aten.log(%sum_3) {layer = "", phase = forward} : tensor<32x1xf32>
    %sub_1 = aten.sub.Tensor(%sub, %_log_softmax) {layer = "", phase = forward} : tensor<32x64xf32>
    %view_7 = aten.view(%slice.5) {layer = "", phase = forward} : tensor<32x1xi64>
    %ne = aten.ne.Scalar(%view_7, other = -100) {layer = "", phase = forward} : tensor<32x1xi1>
    %full_1 = aten.full(fill_value = 0) {layer = "", phase = forward} : tensor<i64>
    %where = aten.where.self(%ne, %view_7, %full_1) {layer = "", phase = forward} : tensor<32x1xi64>
    %gather = aten.gather(%sub_1, %where, dim = 1) {layer = "", phase = forward} : tensor<32x1xf32>
    %view_8 = aten.view(%slice.5) {layer = "", phase = forward} : tensor<32x1xi64>
    %eq = aten.eq.Scalar(%view_8, other = -100) {layer = "", phase = forward} : tensor<32x1xi1>
    %neg_1 = aten.neg(%gather) {layer = "", phase = forward} : tensor<32x1xf32>
    %masked_fill = aten.masked_fill.Scalar(%neg_1, %eq, value = 0.0) {layer = "", phase = forward} : tensor<32x1xf32>
    %to_copy = aten._to_copy(%ne) {layer = "", phase = forward} : tensor<32x1xf32>
    %sum_4 = aten.sum.dim_IntList(%to_copy, dim = [0, 1]) {layer = "", phase = forward} : tensor<f32>
    %sum_5 = aten.sum.dim_IntList(%masked_fill, dim = [0, 1]) {layer = "", phase = forward} : tensor<f32>
    %div_4 = aten.div.Tensor(%sum_5, %sum_4) {layer = "", phase = forward} : tensor<f32>
    %view_9 = aten.view(%slice.5) {layer = "", phase = forward} : tensor<32x1xi64>
    %ne_1 = aten.ne.Scalar(%view_9, other = -100) {layer = "", phase = forward} : tensor<32x1xi1>
    %full_2 = aten.full(fill_value = 0) {layer = "", phase = forward} : tensor<i64>
    %where_1 = aten.where.self(%ne_1, %view_9, %full_2) {layer = "", phase = forward} : tensor<32x1xi64>
    %div_5 = aten.div.Tensor(%tangent, %sum_4) {layer = "", phase = backward} : tensor<f32>
    %full_3 = aten.full(fill_value = 0.0) {layer = "", phase = forward} : tensor<f32>
    %neg_2 = aten.neg(%div_5) {layer = "", phase = backward} : tensor<f32>
    %where_2 = aten.where.self(%ne_1, %neg_2, %full_3) {layer = "", phase = backward} : tensor<32x1xf32>
    %exp_1 = aten.exp(%sub_1) {layer = "", phase = forward} : tensor<32x64xf32>
    %neg_3 = aten.neg(%where_2) {layer = "", phase = backward} : tensor<32x1xf32>
    %mul_1 = aten.mul.Tensor(%exp_1, %neg_3) {layer = "", phase = backward} : tensor<32x64xf32>
    %scatter_add_1 = aten.scatter_add(%mul_1, %where_1, %where_2, dim = 1) {layer = "", phase = backward} : tensor<32x64xf32>
    %permute_12 = aten.permute(%scatter_add_1, dims = [1, 0]) {layer = "lm_head", phase = backward} : tensor<64x32xf32>
    %mm.8 = aten.mm(%permute_12, %view.15) {layer = "lm_head", phase = backward} : tensor<64x32xf32>
    %mm.9 = aten.mm(%scatter_add_1, %lm_head.weight) {layer = "lm_head", phase = backward} : tensor<32x32xf32>
    %view.20 = aten.view(%mm.9) {layer = "lm_head", phase = backward} : tensor<8x4x32xf32>
    %mul.15 = aten.mul.Tensor(%view.20, %model.norm.weight) {layer = "model.norm", phase = backward} : tensor<8x4x32xf32>
    %mul.16 = aten.mul.Tensor(%view.20, %mul.13) {layer = "model.norm", phase = backward} : tensor<8x4x32xf32>
    %sum.2 = aten.sum.dim_IntList(%mul.16, dim = [0, 1], keepdim = true) {layer = "model.norm", phase = backward} : tensor<1x1x32xf32>
    %view.21 = aten.view(%sum.2) {layer = "model.norm", phase = backward} : tensor<32xf32>
    %mul.17 = aten.mul.Tensor(%mul.15, %add.6) {layer = "model.norm", phase = backward} : tensor<8x4x32xf32>
    %mul.18 = aten.mul.Tensor(%mul.15, %rsqrt.2) {layer = "model.norm", phase = backward} : tensor<8x4x32xf32>
    %sum.3 = aten.sum.dim_IntList(%mul.17, dim = [2], keepdim = true) {layer = "model.norm", phase = backward} : tensor<8x4x1xf32>
    %pow.4 = aten.pow.Tensor_Scalar(%rsqrt.2, exponent = 3) {layer = "model.norm", phase = forward} : tensor<8x4x1xf32>
    %mul.19 = aten.mul.Scalar(%sum.3, other = -0.5) {layer = "model.norm", phase = backward} : tensor<8x4x1xf32>
    %mul.20 = aten.mul.Tensor(%mul.19, %pow.4) {layer = "model.norm", phase = backward} : tensor<8x4x1xf32>
    %expand.1 = aten.expand(%mul.20) {layer = "model.norm", phase = backward} : tensor<8x4x32xf32>
    %div.1 = aten.div.Scalar(%expand.1, other = 32) {layer = "model.norm", phase = backward} : tensor<8x4x32xf32>
    %pow.5 = aten.pow.Tensor_Scalar(%add.6, exponent = 1.0) {layer = "model.norm", phase = forward} : tensor<8x4x32xf32>
    %mul.21 = aten.mul.Scalar(%pow.5, other = 2.0) {layer = "model.norm", phase = forward} : tensor<8x4x32xf32>
    %mul.22 = aten.mul.Tensor(%div.1, %mul.21) {layer = "model.norm", phase = backward} : tensor<8x4x32xf32>
    %add.8 = aten.add.Tensor(%mul.18, %mul.22) {layer = "model.norm", phase = backward} : tensor<8x4x32xf32>
    %view.22 = aten.view(%add.8) {layer = "model.layers.0.mlp", phase = backward} : tensor<32x32xf32>
    %permute_13 = aten.permute(%view.13, dims = [1, 0]) {layer = "model.layers.0.mlp.experts", phase = forward} : tensor<256x32xf32>
    %mm.10 = aten.mm(%permute_13, %view.22) {layer = "model.layers.0.mlp.experts", phase = backward} : tensor<256x32xf32>
    %permute_14 = aten.permute(%view_6, dims = [1, 0]) {layer = "model.layers.0.mlp.experts", phase = forward} : tensor<32x256xf32>
    %mm.11 = aten.mm(%view.22, %permute_14) {layer = "model.layers.0.mlp.experts", phase = backward} : tensor<32x256xf32>
    %view.23 = aten.view(%mm.10) {layer = "model.layers.0.mlp.experts", phase = backward} : tensor<4x64x32xf32>
    %view.24 = aten.view(%mm.11) {layer = "model.layers.0.mlp.experts", phase = backward} : tensor<32x4x64xf32>
    %mul.23 = aten.mul.Tensor(%view.24, %mul.11) {layer = "model.layers.0.mlp.experts", phase = backward} : tensor<32x4x64xf32>
    %mul.24 = aten.mul.Tensor(%view.24, %view_5) {layer = "model.layers.0.mlp.experts", phase = backward} : tensor<32x4x64xf32>
    %sum.4 = aten.sum.dim_IntList(%mul.23, dim = [2], keepdim = true) {layer = "model.layers.0.mlp.experts", phase = backward} : tensor<32x4x1xf32>
    %view_10 = aten.view(%sum.4) {layer = "model.layers.0.mlp.experts", phase = backward} : tensor<32x4xf32>
    %mul.25 = aten.mul.Tensor(%mul.24, %silu) {layer = "model.layers.0.mlp.experts", phase = backward} : tensor<32x4x64xf32>
    %mul.26 = aten.mul.Tensor(%mul.24, %slice_1) {layer = "model.layers.0.mlp.experts", phase = backward} : tensor<32x4x64xf32>
    %silu_backward = aten.silu_backward(%mul.26, %slice) {layer = "model.layers.0.mlp.experts.act_fn", phase = backward} : tensor<32x4x64xf32>
    %cat.3 = aten.cat([%silu_backward, %mul.25], dim = 2) {layer = "model.layers.0.mlp.experts", phase = backward} : tensor<32x4x128xf32>
    %view.25 = aten.view(%cat.3) {layer = "model.layers.0.mlp.experts", phase = backward} : tensor<32x512xf32>
    %permute_15 = aten.permute(%view.25, dims = [1, 0]) {layer = "model.layers.0.mlp.experts", phase = backward} : tensor<512x32xf32>
    %mm.12 = aten.mm(%permute_15, %view.9) {layer = "model.layers.0.mlp.experts", phase = backward} : tensor<512x32xf32>
    %permute_16 = aten.permute(%mm.12, dims = [1, 0]) {layer = "model.layers.0.mlp.experts", phase = backward} : tensor<32x512xf32>
    %permute_17 = aten.permute(%view.11, dims = [1, 0]) {layer = "model.layers.0.mlp.experts", phase = forward} : tensor<512x32xf32>
    %mm.13 = aten.mm(%view.25, %permute_17) {layer = "model.layers.0.mlp.experts", phase = backward} : tensor<32x32xf32>
    %view.26 = aten.view(%permute_16) {layer = "model.layers.0.mlp.experts", phase = backward} : tensor<32x4x128xf32>
    %gather_1 = aten.gather(%view_10, %topk_1, dim = 1) {layer = "model.layers.0.mlp.experts", phase = backward} : tensor<32x2xf32>
    %permute_18 = aten.permute(%view.23, dims = [0, 2, 1]) {layer = "model.layers.0.mlp.experts", phase = backward} : tensor<4x32x64xf32>
    %permute_19 = aten.permute(%view.26, dims = [1, 2, 0]) {layer = "model.layers.0.mlp.experts", phase = backward} : tensor<4x128x32xf32>
    %div.2 = aten.div.Tensor(%topk, %sum.1) {layer = "model.layers.0.mlp.gate", phase = forward} : tensor<32x2xf32>
    %div.3 = aten.div.Tensor(%div.2, %sum.1) {layer = "model.layers.0.mlp.gate", phase = forward} : tensor<32x2xf32>
    %neg.2 = aten.neg(%gather_1) {layer = "model.layers.0.mlp.experts", phase = backward} : tensor<32x2xf32>
    %mul.27 = aten.mul.Tensor(%neg.2, %div.3) {layer = "model.layers.0.mlp", phase = backward} : tensor<32x2xf32>
    %div.4 = aten.div.Tensor(%gather_1, %sum.1) {layer = "model.layers.0.mlp", phase = backward} : tensor<32x2xf32>
    %sum.5 = aten.sum.dim_IntList(%mul.27, dim = [1], keepdim = true) {layer = "model.layers.0.mlp", phase = backward} : tensor<32x1xf32>
    %expand.2 = aten.expand(%sum.5) {layer = "model.layers.0.mlp.gate", phase = backward} : tensor<32x2xf32>
    %add.9 = aten.add.Tensor(%div.4, %expand.2) {layer = "model.layers.0.mlp", phase = backward} : tensor<32x2xf32>
    %full_4 = aten.full(fill_value = 0.0) {layer = "model.layers.0.mlp.gate", phase = forward} : tensor<32x4xf32>
    %scatter = aten.scatter.src(%full_4, %topk_1, %add.9, dim = -1) {layer = "model.layers.0.mlp.gate", phase = backward} : tensor<32x4xf32>
    %_softmax_backward_data = aten._softmax_backward_data(%scatter, %_softmax, dim = -1, input_dtype = f32) {layer = "model.layers.0.mlp.gate", phase = backward} : tensor<32x4xf32>
    %permute_20 = aten.permute(%_softmax_backward_data, dims = [1, 0]) {layer = "model.layers.0.mlp.gate", phase = backward} : tensor<4x32xf32>
    %mm.14 = aten.mm(%permute_20, %view.10) {layer = "model.layers.0.mlp.gate", phase = backward} : tensor<4x32xf32>
    %mm.15 = aten.mm(%_softmax_backward_data, %model.layers.0.mlp.gate.weight) {layer = "model.layers.0.mlp.gate", phase = backward} : tensor<32x32xf32>
    %add.10 = aten.add.Tensor(%mm.13, %mm.15) {layer = "model.layers.0.mlp", phase = backward} : tensor<32x32xf32>
    %view.28 = aten.view(%add.10) {layer = "model.layers.0.mlp", phase = backward} : tensor<8x4x32xf32>
    %mul.28 = aten.mul.Tensor(%view.28, %model.layers.0.post_attention_layernorm.weight) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<8x4x32xf32>
    %mul.29 = aten.mul.Tensor(%view.28, %mul.9) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<8x4x32xf32>
    %sum.6 = aten.sum.dim_IntList(%mul.29, dim = [0, 1], keepdim = true) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<1x1x32xf32>
    %view.29 = aten.view(%sum.6) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<32xf32>
    %mul.30 = aten.mul.Tensor(%mul.28, %add.4) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<8x4x32xf32>
    %mul.31 = aten.mul.Tensor(%mul.28, %rsqrt.1) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<8x4x32xf32>
    %sum.7 = aten.sum.dim_IntList(%mul.30, dim = [2], keepdim = true) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<8x4x1xf32>
    %add.11 = aten.add.Tensor(%add.8, %mul.31) {layer = "model", phase = backward} : tensor<8x4x32xf32>
    %pow.6 = aten.pow.Tensor_Scalar(%rsqrt.1, exponent = 3) {layer = "model.layers.0.post_attention_layernorm", phase = forward} : tensor<8x4x1xf32>
    %mul.32 = aten.mul.Scalar(%sum.7, other = -0.5) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<8x4x1xf32>
    %mul.33 = aten.mul.Tensor(%mul.32, %pow.6) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<8x4x1xf32>
    %expand.3 = aten.expand(%mul.33) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<8x4x32xf32>
    %div.5 = aten.div.Scalar(%expand.3, other = 32) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<8x4x32xf32>
    %pow.7 = aten.pow.Tensor_Scalar(%add.4, exponent = 1.0) {layer = "model.layers.0.post_attention_layernorm", phase = forward} : tensor<8x4x32xf32>
    %mul.34 = aten.mul.Scalar(%pow.7, other = 2.0) {layer = "model.layers.0.post_attention_layernorm", phase = forward} : tensor<8x4x32xf32>
    %mul.35 = aten.mul.Tensor(%div.5, %mul.34) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<8x4x32xf32>
    %add.12 = aten.add.Tensor(%add.11, %mul.35) {layer = "model", phase = backward} : tensor<8x4x32xf32>
    %view.30 = aten.view(%add.12) {layer = "model.layers.0.self_attn.o_proj", phase = backward} : tensor<32x32xf32>
    %permute_21 = aten.permute(%view.30, dims = [1, 0]) {layer = "model.layers.0.self_attn.o_proj", phase = backward} : tensor<32x32xf32>
    %mm.16 = aten.mm(%permute_21, %view.8) {layer = "model.layers.0.self_attn.o_proj", phase = backward} : tensor<32x32xf32>
    %mm.17 = aten.mm(%view.30, %model.layers.0.self_attn.o_proj.weight) {layer = "model.layers.0.self_attn.o_proj", phase = backward} : tensor<32x32xf32>
    %view.32 = aten.view(%mm.17) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x4x8xf32>
    %permute_22 = aten.permute(%view.32, dims = [0, 2, 1, 3]) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x4x8xf32>
    %_scaled_dot_product_flash_attention_for_cpu_backward, %_scaled_dot_product_flash_attention_for_cpu_backward_1, %_scaled_dot_product_flash_attention_for_cpu_backward_2 = aten._scaled_dot_product_flash_attention_for_cpu_backward(%permute_22, %add.2, %add.3, %permute_5, %_scaled_dot_product_flash_attention_for_cpu, %_scaled_dot_product_flash_attention_for_cpu_1, dropout_p = 0.0, is_causal = true, scale = 0.3535533905932738) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x4x8xf32>, tensor<8x2x4x8xf32>, tensor<8x2x4x8xf32>
    %mul.36 = aten.mul.Tensor(%_scaled_dot_product_flash_attention_for_cpu_backward_1, %view_3) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x2x4x8xf32>
    %slice.6 = aten.slice.Tensor(%mul.36, dim = 3, start = 0) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x2x4x4xf32>
    %slice.7 = aten.slice.Tensor(%mul.36, dim = 3, start = 4) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x2x4x4xf32>
    %neg.3 = aten.neg(%slice.6) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x2x4x4xf32>
    %slice_backward = aten.slice_backward(%neg.3, dim = 3, start = 4, step = 1) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x2x4x8xf32>
    %slice_backward.1 = aten.slice_backward(%slice.7, dim = 3, start = 0, step = 1) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x2x4x8xf32>
    %add.13 = aten.add.Tensor(%slice_backward, %slice_backward.1) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x2x4x8xf32>
    %mul.37 = aten.mul.Tensor(%_scaled_dot_product_flash_attention_for_cpu_backward_1, %view_2) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x2x4x8xf32>
    %add.14 = aten.add.Tensor(%add.13, %mul.37) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x2x4x8xf32>
    %mul.38 = aten.mul.Tensor(%_scaled_dot_product_flash_attention_for_cpu_backward, %view_3) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x4x8xf32>
    %slice.8 = aten.slice.Tensor(%mul.38, dim = 3, start = 0) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x4x4xf32>
    %slice.9 = aten.slice.Tensor(%mul.38, dim = 3, start = 4) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x4x4xf32>
    %neg.4 = aten.neg(%slice.8) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x4x4xf32>
    %slice_backward.2 = aten.slice_backward(%neg.4, dim = 3, start = 4, step = 1) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x4x8xf32>
    %slice_backward.3 = aten.slice_backward(%slice.9, dim = 3, start = 0, step = 1) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x4x8xf32>
    %add.15 = aten.add.Tensor(%slice_backward.2, %slice_backward.3) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x4x8xf32>
    %mul.39 = aten.mul.Tensor(%_scaled_dot_product_flash_attention_for_cpu_backward, %view_2) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x4x8xf32>
    %add.16 = aten.add.Tensor(%add.15, %mul.39) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x4x8xf32>
    %permute_23 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu_backward_2, dims = [0, 2, 1, 3]) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x2x8xf32>
    %view.35 = aten.view(%permute_23) {layer = "model.layers.0.self_attn.v_proj", phase = backward} : tensor<32x16xf32>
    %permute_24 = aten.permute(%view.35, dims = [1, 0]) {layer = "model.layers.0.self_attn.v_proj", phase = backward} : tensor<16x32xf32>
    %mm.18 = aten.mm(%permute_24, %view.4) {layer = "model.layers.0.self_attn.v_proj", phase = backward} : tensor<16x32xf32>
    %mm.19 = aten.mm(%view.35, %model.layers.0.self_attn.v_proj.weight) {layer = "model.layers.0.self_attn.v_proj", phase = backward} : tensor<32x32xf32>
    %view.36 = aten.view(%mm.19) {layer = "model.layers.0.self_attn.v_proj", phase = backward} : tensor<8x4x32xf32>
    %permute_25 = aten.permute(%add.14, dims = [0, 2, 1, 3]) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x2x8xf32>
    %view.37 = aten.view(%permute_25) {layer = "model.layers.0.self_attn.k_proj", phase = backward} : tensor<32x16xf32>
    %permute_26 = aten.permute(%view.37, dims = [1, 0]) {layer = "model.layers.0.self_attn.k_proj", phase = backward} : tensor<16x32xf32>
    %mm.20 = aten.mm(%permute_26, %view.2) {layer = "model.layers.0.self_attn.k_proj", phase = backward} : tensor<16x32xf32>
    %mm.21 = aten.mm(%view.37, %model.layers.0.self_attn.k_proj.weight) {layer = "model.layers.0.self_attn.k_proj", phase = backward} : tensor<32x32xf32>
    %view.38 = aten.view(%mm.21) {layer = "model.layers.0.self_attn.k_proj", phase = backward} : tensor<8x4x32xf32>
    %add.17 = aten.add.Tensor(%view.36, %view.38) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x32xf32>
    %permute_27 = aten.permute(%add.16, dims = [0, 2, 1, 3]) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x4x8xf32>
    %view.39 = aten.view(%permute_27) {layer = "model.layers.0.self_attn.q_proj", phase = backward} : tensor<32x32xf32>
    %permute_28 = aten.permute(%view.39, dims = [1, 0]) {layer = "model.layers.0.self_attn.q_proj", phase = backward} : tensor<32x32xf32>
    %mm.22 = aten.mm(%permute_28, %view_1) {layer = "model.layers.0.self_attn.q_proj", phase = backward} : tensor<32x32xf32>
    %mm.23 = aten.mm(%view.39, %model.layers.0.self_attn.q_proj.weight) {layer = "model.layers.0.self_attn.q_proj", phase = backward} : tensor<32x32xf32>
    %view.40 = aten.view(%mm.23) {layer = "model.layers.0.self_attn.q_proj", phase = backward} : tensor<8x4x32xf32>
    %add.18 = aten.add.Tensor(%add.17, %view.40) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x32xf32>
    %mul.40 = aten.mul.Tensor(%add.18, %model.layers.0.input_layernorm.weight) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<8x4x32xf32>
    %mul.41 = aten.mul.Tensor(%add.18, %mul.3) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<8x4x32xf32>
    %sum.8 = aten.sum.dim_IntList(%mul.41, dim = [0, 1], keepdim = true) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<1x1x32xf32>
    %view.41 = aten.view(%sum.8) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<32xf32>
    %mul.42 = aten.mul.Tensor(%mul.40, %embedding) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<8x4x32xf32>
    %mul.43 = aten.mul.Tensor(%mul.40, %rsqrt) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<8x4x32xf32>
    %sum.9 = aten.sum.dim_IntList(%mul.42, dim = [2], keepdim = true) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<8x4x1xf32>
    %add.19 = aten.add.Tensor(%add.12, %mul.43) {layer = "model", phase = backward} : tensor<8x4x32xf32>
    %pow.8 = aten.pow.Tensor_Scalar(%rsqrt, exponent = 3) {layer = "model.layers.0.input_layernorm", phase = forward} : tensor<8x4x1xf32>
    %mul.44 = aten.mul.Scalar(%sum.9, other = -0.5) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<8x4x1xf32>
    %mul.45 = aten.mul.Tensor(%mul.44, %pow.8) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<8x4x1xf32>
    %expand.4 = aten.expand(%mul.45) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<8x4x32xf32>
    %div.6 = aten.div.Scalar(%expand.4, other = 32) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<8x4x32xf32>
    %pow.9 = aten.pow.Tensor_Scalar(%embedding, exponent = 1.0) {layer = "model.layers.0.input_layernorm", phase = forward} : tensor<8x4x32xf32>
    %mul.46 = aten.mul.Scalar(%pow.9, other = 2.0) {layer = "model.layers.0.input_layernorm", phase = forward} : tensor<8x4x32xf32>
    %mul.47 = aten.mul.Tensor(%div.6, %mul.46) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<8x4x32xf32>
    %add.20 = aten.add.Tensor(%add.19, %mul.47) {layer = "model", phase = backward} : tensor<8x4x32xf32>
    %embedding_dense_backward = aten.embedding_dense_backward(%add.20, %input_ids, padding_idx = -1, scale_grad_by_freq = false) {layer = "model.embed_tokens", phase = backward} : tensor<64x32xf32>
    func.return %div_4, %embedding_dense_backward, %mm.22, %mm.20, %mm.18, %mm.16, %mm.14, %permute_19, %permute_18, %view.41, %view.29, %view.21, %mm.8 : tensor<f32>, tensor<64x32xf32>, tensor<32x32xf32>, tensor<16x32xf32>, tensor<16x32xf32>, tensor<32x32xf32>, tensor<4x32xf32>, tensor<4x128x32xf32>, tensor<4x32x64xf32>, tensor<32xf32>, tensor<32xf32>, tensor<32xf32>, tensor<64x32xf32>
  }
}
