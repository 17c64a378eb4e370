builtin.module {
  func.func @step(%model.embed_tokens.weight: tensor<32x16xbf16> {dist.kind = "param", dist.name = "model.embed_tokens.weight"}, %model.layers.0.self_attn.q_proj.weight: tensor<16x16xbf16> {dist.kind = "param", dist.name = "model.layers.0.self_attn.q_proj.weight"}, %model.layers.0.self_attn.k_proj.weight: tensor<8x16xbf16> {dist.kind = "param", dist.name = "model.layers.0.self_attn.k_proj.weight"}, %model.layers.0.self_attn.v_proj.weight: tensor<8x16xbf16> {dist.kind = "param", dist.name = "model.layers.0.self_attn.v_proj.weight"}, %model.layers.0.self_attn.o_proj.weight: tensor<16x16xbf16> {dist.kind = "param", dist.name = "model.layers.0.self_attn.o_proj.weight"}, %model.layers.0.mlp.gate_proj.weight: tensor<32x16xbf16> {dist.kind = "param", dist.name = "model.layers.0.mlp.gate_proj.weight"}, %model.layers.0.mlp.up_proj.weight: tensor<32x16xbf16> {dist.kind = "param", dist.name = "model.layers.0.mlp.up_proj.weight"}, %model.layers.0.mlp.down_proj.weight: tensor<16x32xbf16> {dist.kind = "param", dist.name = "model.layers.0.mlp.down_proj.weight"}, %model.layers.0.input_layernorm.weight: tensor<16xbf16> {dist.kind = "param", dist.name = "model.layers.0.input_layernorm.weight"}, %model.layers.0.post_attention_layernorm.weight: tensor<16xbf16> {dist.kind = "param", dist.name = "model.layers.0.post_attention_layernorm.weight"}, %model.norm.weight: tensor<16xbf16> {dist.kind = "param", dist.name = "model.norm.weight"}, %lm_head.weight: tensor<32x16xbf16> {dist.kind = "param", dist.name = "lm_head.weight"}, %model.rotary_emb.inv_freq: tensor<1xf32> {dist.kind = "buffer", dist.name = "model.rotary_emb.inv_freq"}, %input_ids: tensor<8x16xi64> {dist.kind = "input", dist.name = "input_ids"}, %labels: tensor<8x16xi64> {dist.kind = "input", dist.name = "labels"}, %tangent: tensor<f32> {dist.kind = "tangent", dist.name = "loss"}) -> (tensor<f32> {dist.kind = "output", dist.name = "0"}, tensor<32x16xbf16> {dist.kind = "grad", dist.name = "model.embed_tokens.weight"}, tensor<16x16xbf16> {dist.kind = "grad", dist.name = "model.layers.0.self_attn.q_proj.weight"}, tensor<8x16xbf16> {dist.kind = "grad", dist.name = "model.layers.0.self_attn.k_proj.weight"}, tensor<8x16xbf16> {dist.kind = "grad", dist.name = "model.layers.0.self_attn.v_proj.weight"}, tensor<16x16xbf16> {dist.kind = "grad", dist.name = "model.layers.0.self_attn.o_proj.weight"}, tensor<32x16xbf16> {dist.kind = "grad", dist.name = "model.layers.0.mlp.gate_proj.weight"}, tensor<32x16xbf16> {dist.kind = "grad", dist.name = "model.layers.0.mlp.up_proj.weight"}, tensor<16x32xbf16> {dist.kind = "grad", dist.name = "model.layers.0.mlp.down_proj.weight"}, tensor<16xbf16> {dist.kind = "grad", dist.name = "model.layers.0.input_layernorm.weight"}, tensor<16xbf16> {dist.kind = "grad", dist.name = "model.layers.0.post_attention_layernorm.weight"}, tensor<16xbf16> {dist.kind = "grad", dist.name = "model.norm.weight"}, tensor<32x16xbf16> {dist.kind = "grad", dist.name = "lm_head.weight"}) {
    %embedding = aten.embedding(%model.embed_tokens.weight, %input_ids) {layer = "model.embed_tokens", phase = forward} : tensor<8x16x16xbf16>
    %arange = aten.arange.start_step(start = 0) {layer = "model", phase = forward} : tensor<16xi64>
    %view = aten.view(%arange) {layer = "model.rotary_emb", phase = forward} : tensor<1x16x1xi64>
    %_to_copy = aten._to_copy(%view) {layer = "model.rotary_emb", phase = forward} : tensor<1x16x1xf32>
    %mul = aten.mul.Tensor(%_to_copy, %model.rotary_emb.inv_freq) {layer = "model.rotary_emb", phase = forward} : tensor<1x16x1xf32>
    %cat = aten.cat([%mul, %mul], dim = 2) {layer = "model.rotary_emb", phase = forward} : tensor<1x16x2xf32>
    %cos = aten.cos(%cat) {layer = "model.rotary_emb", phase = forward} : tensor<1x16x2xf32>
    %sin = aten.sin(%cat) {layer = "model.rotary_emb", phase = forward} : tensor<1x16x2xf32>
    %_to_copy.1 = aten._to_copy(%cos) {layer = "model.rotary_emb", phase = forward} : tensor<1x16x2xbf16>
    %_to_copy.2 = aten._to_copy(%sin) {layer = "model.rotary_emb", phase = forward} : tensor<1x16x2xbf16>
    %_to_copy.3 = aten._to_copy(%embedding) {layer = "model.layers.0.input_layernorm", phase = forward} : tensor<8x16x16xf32>
    %pow.1 = aten.pow.Tensor_Scalar(%_to_copy.3, exponent = 2) {layer = "model.layers.0.input_layernorm", phase = forward} : tensor<8x16x16xf32>
    %sum = aten.sum.dim_IntList(%pow.1, dim = [2], keepdim = true) {layer = "model.layers.0.input_layernorm", phase = forward} : tensor<8x16x1xf32>
    %div = aten.div.Scalar(%sum, other = 16) {layer = "model.layers.0.input_layernorm", phase = forward} : tensor<8x16x1xf32>
    %add.1 = aten.add.Scalar(%div, other = 1.0e-06) {layer = "model.layers.0.input_layernorm", phase = forward} : tensor<8x16x1xf32>
    %rsqrt = aten.rsqrt(%add.1) {layer = "model.layers.0.input_layernorm", phase = forward} : tensor<8x16x1xf32>
    %mul.3 = aten.mul.Tensor(%_to_copy.3, %rsqrt) {layer = "model.layers.0.input_layernorm", phase = forward} : tensor<8x16x16xf32>
    %_to_copy.4 = aten._to_copy(%mul.3) {layer = "model.layers.0.input_layernorm", phase = forward} : tensor<8x16x16xbf16>
    %mul.4 = aten.mul.Tensor(%model.layers.0.input_layernorm.weight, %_to_copy.4) {layer = "model.layers.0.input_layernorm", phase = forward} : tensor<8x16x16xbf16>
    %permute = aten.permute(%model.layers.0.self_attn.q_proj.weight, dims = [1, 0]) {layer = "model.layers.0.self_attn.q_proj", phase = forward} : tensor<16x16xbf16>
    %view_1 = aten.view(%mul.4) {layer = "model.layers.0.self_attn.q_proj", phase = forward} : tensor<128x16xbf16>
    %mm = aten.mm(%view_1, %permute) {layer = "model.layers.0.self_attn.q_proj", phase = forward} : tensor<128x16xbf16>
    %view.1 = aten.view(%mm) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x16x8x2xbf16>
    %permute_1 = aten.permute(%view.1, dims = [0, 2, 1, 3]) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x8x16x2xbf16>
    %permute_2 = aten.permute(%model.layers.0.self_attn.k_proj.weight, dims = [1, 0]) {layer = "model.layers.0.self_attn.k_proj", phase = forward} : tensor<16x8xbf16>
    %view.2 = aten.view(%mul.4) {layer = "model.layers.0.self_attn.k_proj", phase = forward} : tensor<128x16xbf16>
    %mm.1 = aten.mm(%view.2, %permute_2) {layer = "model.layers.0.self_attn.k_proj", phase = forward} : tensor<128x8xbf16>
    %view.3 = aten.view(%mm.1) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x16x4x2xbf16>
    %permute_3 = aten.permute(%view.3, dims = [0, 2, 1, 3]) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x4x16x2xbf16>
    %permute_4 = aten.permute(%model.layers.0.self_attn.v_proj.weight, dims = [1, 0]) {layer = "model.layers.0.self_attn.v_proj", phase = forward} : tensor<16x8xbf16>
    %view.4 = aten.view(%mul.4) {layer = "model.layers.0.self_attn.v_proj", phase = forward} : tensor<128x16xbf16>
    %mm.2 = aten.mm(%view.4, %permute_4) {layer = "model.layers.0.self_attn.v_proj", phase = forward} : tensor<128x8xbf16>
    %view.5 = aten.view(%mm.2) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x16x4x2xbf16>
    %permute_5 = aten.permute(%view.5, dims = [0, 2, 1, 3]) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x4x16x2xbf16>
    %view_2 = aten.view(%_to_copy.1) {layer = "model.layers.0.self_attn", phase = forward} : tensor<1x1x16x2xbf16>
    %view_3 = aten.view(%_to_copy.2) {layer = "model.layers.0.self_attn", phase = forward} : tensor<1x1x16x2xbf16>
    %mul.5 = aten.mul.Tensor(%permute_1, %view_2) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x8x16x2xbf16>
    %slice.1 = aten.slice.Tensor(%permute_1, dim = 3, start = 0) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x8x16x1xbf16>
    %slice.2 = aten.slice.Tensor(%permute_1, dim = 3, start = 1) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x8x16x1xbf16>
    %neg = aten.neg(%slice.2) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x8x16x1xbf16>
    %cat.1 = aten.cat([%neg, %slice.1], dim = 3) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x8x16x2xbf16>
    %mul.6 = aten.mul.Tensor(%cat.1, %view_3) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x8x16x2xbf16>
    %add.2 = aten.add.Tensor(%mul.5, %mul.6) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x8x16x2xbf16>
    %mul.7 = aten.mul.Tensor(%permute_3, %view_2) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x4x16x2xbf16>
    %slice.3 = aten.slice.Tensor(%permute_3, dim = 3, start = 0) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x4x16x1xbf16>
    %slice.4 = aten.slice.Tensor(%permute_3, dim = 3, start = 1) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x4x16x1xbf16>
    %neg.1 = aten.neg(%slice.4) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x4x16x1xbf16>
    %cat.2 = aten.cat([%neg.1, %slice.3], dim = 3) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x4x16x2xbf16>
    %mul.8 = aten.mul.Tensor(%cat.2, %view_3) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x4x16x2xbf16>
    %add.3 = aten.add.Tensor(%mul.7, %mul.8) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x4x16x2xbf16>
    %_scaled_dot_product_flash_attention_for_cpu, %_scaled_dot_product_flash_attention_for_cpu_1 = aten._scaled_dot_product_flash_attention_for_cpu(%add.2, %add.3, %permute_5, is_causal = true, scale = 0.7071067811865476) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x8x16x2xbf16>, tensor<8x8x16xf32>
    %permute_6 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu, dims = [0, 2, 1, 3]) {layer = "model.layers.0.self_attn", phase = forward} : tensor<8x16x8x2xbf16>
    %permute_7 = aten.permute(%model.layers.0.self_attn.o_proj.weight, dims = [1, 0]) {layer = "model.layers.0.self_attn.o_proj", phase = forward} : tensor<16x16xbf16>
    %view.8 = aten.view(%permute_6) {layer = "model.layers.0.self_attn.o_proj", phase = forward} : tensor<128x16xbf16>
    %mm.3 = aten.mm(%view.8, %permute_7) {layer = "model.layers.0.self_attn.o_proj", phase = forward} : tensor<128x16xbf16>
    %view_4 = aten.view(%mm.3) {layer = "model.layers.0.self_attn.o_proj", phase = forward} : tensor<8x16x16xbf16>
    %add.4 = aten.add.Tensor(%embedding, %view_4) {layer = "model.layers.0", phase = forward} : tensor<8x16x16xbf16>
    %_to_copy.5 = aten._to_copy(%add.4) {layer = "model.layers.0.post_attention_layernorm", phase = forward} : tensor<8x16x16xf32>
    %pow.2 = aten.pow.Tensor_Scalar(%_to_copy.5, exponent = 2) {layer = "model.layers.0.post_attention_layernorm", phase = forward} : tensor<8x16x16xf32>
    %sum_1 = aten.sum.dim_IntList(%pow.2, dim = [2], keepdim = true) {layer = "model.layers.0.post_attention_layernorm", phase = forward} : tensor<8x16x1xf32>
    %div_1 = aten.div.Scalar(%sum_1, other = 16) {layer = "model.layers.0.post_attention_layernorm", phase = forward} : tensor<8x16x1xf32>
    %add.5 = aten.add.Scalar(%div_1, other = 1.0e-06) {layer = "model.layers.0.post_attention_layernorm", phase = forward} : tensor<8x16x1xf32>
    %rsqrt.1 = aten.rsqrt(%add.5) {layer = "model.layers.0.post_attention_layernorm", phase = forward} : tensor<8x16x1xf32>
    %mul.9 = aten.mul.Tensor(%_to_copy.5, %rsqrt.1) {layer = "model.layers.0.post_attention_layernorm", phase = forward} : tensor<8x16x16xf32>
    %_to_copy.6 = aten._to_copy(%mul.9) {layer = "model.layers.0.post_attention_layernorm", phase = forward} : tensor<8x16x16xbf16>
    %mul.10 = aten.mul.Tensor(%model.layers.0.post_attention_layernorm.weight, %_to_copy.6) {layer = "model.layers.0.post_attention_layernorm", phase = forward} : tensor<8x16x16xbf16>
    %permute_8 = aten.permute(%model.layers.0.mlp.gate_proj.weight, dims = [1, 0]) {layer = "model.layers.0.mlp.gate_proj", phase = forward} : tensor<16x32xbf16>
    %view.9 = aten.view(%mul.10) {layer = "model.layers.0.mlp.gate_proj", phase = forward} : tensor<128x16xbf16>
    %mm.4 = aten.mm(%view.9, %permute_8) {layer = "model.layers.0.mlp.gate_proj", phase = forward} : tensor<128x32xbf16>
    %view_5 = aten.view(%mm.4) {layer = "model.layers.0.mlp.gate_proj", phase = forward} : tensor<8x16x32xbf16>
    %silu = aten.silu(%view_5) {layer = "model.layers.0.mlp.act_fn", phase = forward} : tensor<8x16x32xbf16>
    %permute_9 = aten.permute(%model.layers.0.mlp.up_proj.weight, dims = [1, 0]) {layer = "model.layers.0.mlp.up_proj", phase = forward} : tensor<16x32xbf16>
    %view.10 = aten.view(%mul.10) {layer = "model.layers.0.mlp.up_proj", phase = forward} : tensor<128x16xbf16>
    %mm.5 = aten.mm(%view.10, %permute_9) {layer = "model.layers.0.mlp.up_proj", phase = forward} : tensor<128x32xbf16>
    %view_6 = aten.view(%mm.5) {layer = "model.layers.0.mlp.up_proj", phase = forward} : tensor<8x16x32xbf16>
    %mul.11 = aten.mul.Tensor(%silu, %view_6) {layer = "model.layers.0.mlp", phase = forward} : tensor<8x16x32xbf16>
    %permute_10 = aten.permute(%model.layers.0.mlp.down_proj.weight, dims = [1, 0]) {layer = "model.layers.0.mlp.down_proj", phase = forward} : tensor<32x16xbf16>
    %view.11 = aten.view(%mul.11) {layer = "model.layers.0.mlp.down_proj", phase = forward} : tensor<128x32xbf16>
    %mm.6 = aten.mm(%view.11, %permute_10) {layer = "model.layers.0.mlp.down_proj", phase = forward} : tensor<128x16xbf16>
    %view_7 = aten.view(%mm.6) {layer = "model.layers.0.mlp.down_proj", phase = forward} : tensor<8x16x16xbf16>
    %add.6 = aten.add.Tensor(%add.4, %view_7) {layer = "model.layers.0", phase = forward} : tensor<8x16x16xbf16>
    %_to_copy.7 = aten._to_copy(%add.6) {layer = "model.norm", phase = forward} : tensor<8x16x16xf32>
    %pow.3 = aten.pow.Tensor_Scalar(%_to_copy.7, exponent = 2) {layer = "model.norm", phase = forward} : tensor<8x16x16xf32>
    %sum_2 = aten.sum.dim_IntList(%pow.3, dim = [2], keepdim = true) {layer = "model.norm", phase = forward} : tensor<8x16x1xf32>
    %div_2 = aten.div.Scalar(%sum_2, other = 16) {layer = "model.norm", phase = forward} : tensor<8x16x1xf32>
    %add.7 = aten.add.Scalar(%div_2, other = 1.0e-06) {layer = "model.norm", phase = forward} : tensor<8x16x1xf32>
    %rsqrt.2 = aten.rsqrt(%add.7) {layer = "model.norm", phase = forward} : tensor<8x16x1xf32>
    %mul.12 = aten.mul.Tensor(%_to_copy.7, %rsqrt.2) {layer = "model.norm", phase = forward} : tensor<8x16x16xf32>
    %_to_copy.8 = aten._to_copy(%mul.12) {layer = "model.norm", phase = forward} : tensor<8x16x16xbf16>
    %mul.13 = aten.mul.Tensor(%model.norm.weight, %_to_copy.8) {layer = "model.norm", phase = forward} : tensor<8x16x16xbf16>
    %permute_11 = aten.permute(%lm_head.weight, dims = [1, 0]) {layer = "lm_head", phase = forward} : tensor<16x32xbf16>
    %view.12 = aten.view(%mul.13) {layer = "lm_head", phase = forward} : tensor<128x16xbf16>
    %mm.7 = aten.mm(%view.12, %permute_11) {layer = "lm_head", phase = forward} : tensor<128x32xbf16>
    %view_8 = aten.view(%mm.7) {layer = "lm_head", phase = forward} : tensor<8x16x32xbf16>
    %_to_copy.9 = aten._to_copy(%view_8) {layer = "", phase = forward} : tensor<8x16x32xf32>
    %constant_pad_nd = aten.constant_pad_nd(%labels, pad = [0, 1], value = -100.0) {layer = "", phase = forward} : tensor<8x17xi64>
    %slice.5 = aten.slice.Tensor(%constant_pad_nd, dim = 1, start = 1) {layer = "", phase = forward} : tensor<8x16xi64>
    %view.13 = aten.view(%_to_copy.9) {layer = "", phase = forward} : tensor<128x32xf32>
    %amax = aten.amax(%view.13, dim = [1], keepdim = true) {layer = "", phase = forward} : tensor<128x1xf32>
    %sub = aten.sub.Tensor(%view.13, %amax) {layer = "", phase = forward} : tensor<128x32xf32>
    %exp = aten.exp(%sub) {layer = "", phase = forward} : tensor<128x32xf32>
    %sum_3 = aten.sum.dim_IntList(%exp, dim = [1], keepdim = true) {layer = "", phase = forward} : tensor<128x1xf32>
    %_log_softmax = aten.log(%sum_3) {layer = "", phase = forward} : tensor<128x1xf32>
    %sub_1 = aten.sub.Tensor(%sub, %_log_softmax) {layer = "", phase = forward} : tensor<128x32xf32>
    %view_9 = aten.view(%slice.5) {layer = "", phase = forward} : tensor<128x1xi64>
    %ne = aten.ne.Scalar(%view_9, other = -100) {layer = "", phase = forward} : tensor<128x1xi1>
    %full = aten.full(fill_value = 0) {layer = "", phase = forward} : tensor<i64>
    %where = aten.where.self(%ne, %view_9, %full) {layer = "", phase = forward} : tensor<128x1xi64>
    %gather = aten.gather(%sub_1, %where, dim = 1) {layer = "", phase = forward} : tensor<128x1xf32>
    %view_10 = aten.view(%slice.5) {layer = "", phase = forward} : tensor<128x1xi64>
    %eq = aten.eq.Scalar(%view_10, other = -100) {layer = "", phase = forward} : tensor<128x1xi1>
    %neg_1 = aten.neg(%gather) {layer = "", phase = forward} : tensor<128x1xf32>
    %masked_fill = aten.masked_fill.Scalar(%neg_1, %eq, value = 0.0) {layer = "", phase = forward} : tensor<128x1xf32>
    %to_copy = aten._to_copy(%ne) {layer = "", phase = forward} : tensor<128x1xf32>
    %sum_4 = aten.sum.dim_IntList(%to_copy, dim = [0, 1]) {layer = "", phase = forward} : tensor<f32>
    %sum_5 = aten.sum.dim_IntList(%masked_fill, dim = [0, 1]) {layer = "", phase = forward} : tensor<f32>
    %div_3 = aten.div.Tensor(%sum_5, %sum_4) {layer = "", phase = forward} : tensor<f32>
    %view_11 = aten.view(%slice.5) {layer = "", phase = forward} : tensor<128x1xi64>
    %ne_1 = aten.ne.Scalar(%view_11, other = -100) {layer = "", phase = forward} : tensor<128x1xi1>
    %full_1 = aten.full(fill_value = 0) {layer = "", phase = forward} : tensor<i64>
    %where_1 = aten.where.self(%ne_1, %view_11, %full_1) {layer = "", phase = forward} : tensor<128x1xi64>
    %div_4 = aten.div.Tensor(%tangent, %sum_4) {layer = "", phase = backward} : tensor<f32>
    %full_2 = aten.full(fill_value = 0.0) {layer = "", phase = forward} : tensor<f32>
    %neg_2 = aten.neg(%div_4) {layer = "", phase = backward} : tensor<f32>
    %where_2 = aten.where.self(%ne_1, %neg_2, %full_2) {layer = "", phase = backward} : tensor<128x1xf32>
    %exp_1 = aten.exp(%sub_1) {layer = "", phase = forward} : tensor<128x32xf32>
    %neg_3 = aten.neg(%where_2) {layer = "", phase = backward} : tensor<128x1xf32>
    %mul_1 = aten.mul.Tensor(%exp_1, %neg_3) {layer = "", phase = backward} : tensor<128x32xf32>
    %scatter_add = aten.scatter_add(%mul_1, %where_1, %where_2, dim = 1) {layer = "", phase = backward} : tensor<128x32xf32>
    %view.15 = aten.view(%scatter_add) {layer = "", phase = backward} : tensor<8x16x32xf32>
    %_to_copy.10 = aten._to_copy(%view.15) {layer = "", phase = backward} : tensor<8x16x32xbf16>
    %view.16 = aten.view(%_to_copy.10) {layer = "lm_head", phase = backward} : tensor<128x32xbf16>
    %permute_12 = aten.permute(%view.16, dims = [1, 0]) {layer = "lm_head", phase = backward} : tensor<32x128xbf16>
    %mm.8 = aten.mm(%permute_12, %view.12) {layer = "lm_head", phase = backward} : tensor<32x16xbf16>
    %mm.9 = aten.mm(%view.16, %lm_head.weight) {layer = "lm_head", phase = backward} : tensor<128x16xbf16>
    %view.17 = aten.view(%mm.9) {layer = "lm_head", phase = backward} : tensor<8x16x16xbf16>
    %mul.14 = aten.mul.Tensor(%view.17, %model.norm.weight) {layer = "model.norm", phase = backward} : tensor<8x16x16xbf16>
    %mul.15 = aten.mul.Tensor(%view.17, %_to_copy.8) {layer = "model.norm", phase = backward} : tensor<8x16x16xbf16>
    %sum.1 = aten.sum.dim_IntList(%mul.15, dim = [0, 1], keepdim = true) {layer = "model.norm", phase = backward} : tensor<1x1x16xbf16>
    %view.18 = aten.view(%sum.1) {layer = "model.norm", phase = backward} : tensor<16xbf16>
    %_to_copy.11 = aten._to_copy(%mul.14) {layer = "model.norm", phase = backward} : tensor<8x16x16xf32>
    %mul.16 = aten.mul.Tensor(%_to_copy.11, %_to_copy.7) {layer = "model.norm", phase = backward} : tensor<8x16x16xf32>
    %mul.17 = aten.mul.Tensor(%_to_copy.11, %rsqrt.2) {layer = "model.norm", phase = backward} : tensor<8x16x16xf32>
    %sum.2 = aten.sum.dim_IntList(%mul.16, dim = [2], keepdim = true) {layer = "model.norm", phase = backward} : tensor<8x16x1xf32>
    %pow.4 = aten.pow.Tensor_Scalar(%rsqrt.2, exponent = 3) {layer = "model.norm", phase = forward} : tensor<8x16x1xf32>
    %mul.18 = aten.mul.Scalar(%sum.2, other = -0.5) {layer = "model.norm", phase = backward} : tensor<8x16x1xf32>
    %mul.19 = aten.mul.Tensor(%mul.18, %pow.4) {layer = "model.norm", phase = backward} : tensor<8x16x1xf32>
    %expand.1 = aten.expand(%mul.19) {layer = "model.norm", phase = backward} : tensor<8x16x16xf32>
    %div_5 = aten.div.Scalar(%expand.1, other = 16) {layer = "model.norm", phase = backward} : tensor<8x16x16xf32>
    %pow.5 = aten.pow.Tensor_Scalar(%_to_copy.7, exponent = 1.0) {layer = "model.norm", phase = forward} : tensor<8x16x16xf32>
    %mul.20 = aten.mul.Scalar(%pow.5, other = 2.0) {layer = "model.norm", phase = forward} : tensor<8x16x16xf32>
    %mul.21 = aten.mul.Tensor(%div_5, %mul.20) {layer = "model.norm", phase = backward} : tensor<8x16x16xf32>
    %add.8 = aten.add.Tensor(%mul.17, %mul.21) {layer = "model.norm", phase = backward} : tensor<8x16x16xf32>
    %_to_copy.12 = aten._to_copy(%add.8) {layer = "model.norm", phase = backward} : tensor<8x16x16xbf16>
    %view.19 = aten.view(%_to_copy.12) {layer = "model.layers.0.mlp.down_proj", phase = backward} : tensor<128x16xbf16>
    %permute_13 = aten.permute(%view.19, dims = [1, 0]) {layer = "model.layers.0.mlp.down_proj", phase = backward} : tensor<16x128xbf16>
    %mm.10 = aten.mm(%permute_13, %view.11) {layer = "model.layers.0.mlp.down_proj", phase = backward} : tensor<16x32xbf16>
    %mm.11 = aten.mm(%view.19, %model.layers.0.mlp.down_proj.weight) {layer = "model.layers.0.mlp.down_proj", phase = backward} : tensor<128x32xbf16>
    %view.20 = aten.view(%mm.11) {layer = "model.layers.0.mlp.down_proj", phase = backward} : tensor<8x16x32xbf16>
    %mul.22 = aten.mul.Tensor(%view.20, %silu) {layer = "model.layers.0.mlp", phase = backward} : tensor<8x16x32xbf16>
    %mul.23 = aten.mul.Tensor(%view.20, %view_6) {layer = "model.layers.0.mlp", phase = backward} : tensor<8x16x32xbf16>
    %view.21 = aten.view(%mul.22) {layer = "model.layers.0.mlp.up_proj", phase = backward} : tensor<128x32xbf16>
    %permute_14 = aten.permute(%view.21, dims = [1, 0]) {layer = "model.layers.0.mlp.up_proj", phase = backward} : tensor<32x128xbf16>
    %mm.12 = aten.mm(%permute_14, %view.10) {layer = "model.layers.0.mlp.up_proj", phase = backward} : tensor<32x16xbf16>
    %mm.13 = aten.mm(%view.21, %model.layers.0.mlp.up_proj.weight) {layer = "model.layers.0.mlp.up_proj", phase = backward} : tensor<128x16xbf16>
    %view.22 = aten.view(%mm.13) {layer = "model.layers.0.mlp.up_proj", phase = backward} : tensor<8x16x16xbf16>
    %silu_backward = aten.silu_backward(%mul.23, %view_5) {layer = "model.layers.0.mlp.act_fn", phase = backward} : tensor<8x16x32xbf16>
    %view.23 = aten.view(%silu_backward) {layer = "model.layers.0.mlp.gate_proj", phase = backward} : tensor<128x32xbf16>
    %permute_15 = aten.permute(%view.23, dims = [1, 0]) {layer = "model.layers.0.mlp.gate_proj", phase = backward} : tensor<32x128xbf16>
    %mm.14 = aten.mm(%permute_15, %view.9) {layer = "model.layers.0.mlp.gate_proj", phase = backward} : tensor<32x16xbf16>
    %mm.15 = aten.mm(%view.23, %model.layers.0.mlp.gate_proj.weight) {layer = "model.layers.0.mlp.gate_proj", phase = backward} : tensor<128x16xbf16>
    %view.24 = aten.view(%mm.15) {layer = "model.layers.0.mlp.gate_proj", phase = backward} : tensor<8x16x16xbf16>
    %add.9 = aten.add.Tensor(%view.22, %view.24) {layer = "model.layers.0.mlp", phase = backward} : tensor<8x16x16xbf16>
    %mul.24 = aten.mul.Tensor(%add.9, %model.layers.0.post_attention_layernorm.weight) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<8x16x16xbf16>
    %mul.25 = aten.mul.Tensor(%add.9, %_to_copy.6) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<8x16x16xbf16>
    %sum.3 = aten.sum.dim_IntList(%mul.25, dim = [0, 1], keepdim = true) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<1x1x16xbf16>
    %view.25 = aten.view(%sum.3) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<16xbf16>
    %_to_copy.13 = aten._to_copy(%mul.24) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<8x16x16xf32>
    %mul.26 = aten.mul.Tensor(%_to_copy.13, %_to_copy.5) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<8x16x16xf32>
    %mul.27 = aten.mul.Tensor(%_to_copy.13, %rsqrt.1) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<8x16x16xf32>
    %sum.4 = aten.sum.dim_IntList(%mul.26, dim = [2], keepdim = true) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<8x16x1xf32>
    %pow.6 = aten.pow.Tensor_Scalar(%rsqrt.1, exponent = 3) {layer = "model.layers.0.post_attention_layernorm", phase = forward} : tensor<8x16x1xf32>
    %mul.28 = aten.mul.Scalar(%sum.4, other = -0.5) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<8x16x1xf32>
    %mul.29 = aten.mul.Tensor(%mul.28, %pow.6) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<8x16x1xf32>
    %expand.2 = aten.expand(%mul.29) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<8x16x16xf32>
    %div.1 = aten.div.Scalar(%expand.2, other = 16) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<8x16x16xf32>
    %pow.7 = aten.pow.Tensor_Scalar(%_to_copy.5, exponent = 1.0) {layer = "model.layers.0.post_attention_layernorm", phase = forward} : tensor<8x16x16xf32>
    %mul.30 = aten.mul.Scalar(%pow.7, other = 2.0) {layer = "model.layers.0.post_attention_layernorm", phase = forward} : tensor<8x16x16xf32>
    %mul.31 = aten.mul.Tensor(%div.1, %mul.30) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<8x16x16xf32>
    %add.10 = aten.add.Tensor(%mul.27, %mul.31) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<8x16x16xf32>
    %_to_copy.14 = aten._to_copy(%add.10) {layer = "model.layers.0.post_attention_layernorm", phase = backward} : tensor<8x16x16xbf16>
    %add.11 = aten.add.Tensor(%_to_copy.12, %_to_copy.14) {layer = "model", phase = backward} : tensor<8x16x16xbf16>
    %view.26 = aten.view(%add.11) {layer = "model.layers.0.self_attn.o_proj", phase = backward} : tensor<128x16xbf16>
    %permute_16 = aten.permute(%view.26, dims = [1, 0]) {layer = "model.layers.0.self_attn.o_proj", phase = backward} : tensor<16x128xbf16>
    %mm.16 = aten.mm(%permute_16, %view.8) {layer = "model.layers.0.self_attn.o_proj", phase = backward} : tensor<16x16xbf16>
    %mm.17 = aten.mm(%view.26, %model.layers.0.self_attn.o_proj.weight) {layer = "model.layers.0.self_attn.o_proj", phase = backward} : tensor<128x16xbf16>
    %view.28 = aten.view(%mm.17) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x16x8x2xbf16>
    %permute_17 = aten.permute(%view.28, dims = [0, 2, 1, 3]) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x8x16x2xbf16>
    %_scaled_dot_product_flash_attention_for_cpu_backward, %_scaled_dot_product_flash_attention_for_cpu_backward_1, %_scaled_dot_product_flash_attention_for_cpu_backward_2 = aten._scaled_dot_product_flash_attention_for_cpu_backward(%permute_17, %add.2, %add.3, %permute_5, %_scaled_dot_product_flash_attention_for_cpu, %_scaled_dot_product_flash_attention_for_cpu_1, dropout_p = 0.0, is_causal = true, scale = 0.7071067811865476) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x8x16x2xbf16>, tensor<8x4x16x2xbf16>, tensor<8x4x16x2xbf16>
    %mul.32 = aten.mul.Tensor(%_scaled_dot_product_flash_attention_for_cpu_backward_1, %view_3) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x16x2xbf16>
    %slice.6 = aten.slice.Tensor(%mul.32, dim = 3, start = 0) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x16x1xbf16>
    %slice.7 = aten.slice.Tensor(%mul.32, dim = 3, start = 1) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x16x1xbf16>
    %neg.2 = aten.neg(%slice.6) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x16x1xbf16>
    %slice_backward = aten.slice_backward(%neg.2, dim = 3, start = 1, step = 1) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x16x2xbf16>
    %slice_backward.1 = aten.slice_backward(%slice.7, dim = 3, start = 0, step = 1) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x16x2xbf16>
    %add.12 = aten.add.Tensor(%slice_backward, %slice_backward.1) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x16x2xbf16>
    %mul.33 = aten.mul.Tensor(%_scaled_dot_product_flash_attention_for_cpu_backward_1, %view_2) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x16x2xbf16>
    %add.13 = aten.add.Tensor(%add.12, %mul.33) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x4x16x2xbf16>
    %mul.34 = aten.mul.Tensor(%_scaled_dot_product_flash_attention_for_cpu_backward, %view_3) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x8x16x2xbf16>
    %slice.8 = aten.slice.Tensor(%mul.34, dim = 3, start = 0) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x8x16x1xbf16>
    %slice.9 = aten.slice.Tensor(%mul.34, dim = 3, start = 1) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x8x16x1xbf16>
    %neg.3 = aten.neg(%slice.8) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x8x16x1xbf16>
    %slice_backward.2 = aten.slice_backward(%neg.3, dim = 3, start = 1, step = 1) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x8x16x2xbf16>
    %slice_backward.3 = aten.slice_backward(%slice.9, dim = 3, start = 0, step = 1) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x8x16x2xbf16>
    %add.14 = aten.add.Tensor(%slice_backward.2, %slice_backward.3) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x8x16x2xbf16>
    %mul.35 = aten.mul.Tensor(%_scaled_dot_product_flash_attention_for_cpu_backward, %view_2) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x8x16x2xbf16>
    %add.15 = aten.add.Tensor(%add.14, %mul.35) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x8x16x2xbf16>
    %permute_18 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu_backward_2, dims = [0, 2, 1, 3]) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x16x4x2xbf16>
    %view.31 = aten.view(%permute_18) {layer = "model.layers.0.self_attn.v_proj", phase = backward} : tensor<128x8xbf16>
    %permute_19 = aten.permute(%view.31, dims = [1, 0]) {layer = "model.layers.0.self_attn.v_proj", phase = backward} : tensor<8x128xbf16>
    %mm.18 = aten.mm(%permute_19, %view.4) {layer = "model.layers.0.self_attn.v_proj", phase = backward} : tensor<8x16xbf16>
    %mm.19 = aten.mm(%view.31, %model.layers.0.self_attn.v_proj.weight) {layer = "model.layers.0.self_attn.v_proj", phase = backward} : tensor<128x16xbf16>
    %view.32 = aten.view(%mm.19) {layer = "model.layers.0.self_attn.v_proj", phase = backward} : tensor<8x16x16xbf16>
    %permute_20 = aten.permute(%add.13, dims = [0, 2, 1, 3]) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x16x4x2xbf16>
    %view.33 = aten.view(%permute_20) {layer = "model.layers.0.self_attn.k_proj", phase = backward} : tensor<128x8xbf16>
    %permute_21 = aten.permute(%view.33, dims = [1, 0]) {layer = "model.layers.0.self_attn.k_proj", phase = backward} : tensor<8x128xbf16>
    %mm.20 = aten.mm(%permute_21, %view.2) {layer = "model.layers.0.self_attn.k_proj", phase = backward} : tensor<8x16xbf16>
    %mm.21 = aten.mm(%view.33, %model.layers.0.self_attn.k_proj.weight) {layer = "model.layers.0.self_attn.k_proj", phase = backward} : tensor<128x16xbf16>
    %view.34 = aten.view(%mm.21) {layer = "model.layers.0.self_attn.k_proj", phase = backward} : tensor<8x16x16xbf16>
    %add.16 = aten.add.Tensor(%view.32, %view.34) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x16x16xbf16>
    %permute_22 = aten.permute(%add.15, dims = [0, 2, 1, 3]) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x16x8x2xbf16>
    %view.35 = aten.view(%permute_22) {layer = "model.layers.0.self_attn.q_proj", phase = backward} : tensor<128x16xbf16>
    %permute_23 = aten.permute(%view.35, dims = [1, 0]) {layer = "model.layers.0.self_attn.q_proj", phase = backward} : tensor<16x128xbf16>
    %mm.22 = aten.mm(%permute_23, %view_1) {layer = "model.layers.0.self_attn.q_proj", phase = backward} : tensor<16x16xbf16>
    %mm.23 = aten.mm(%view.35, %model.layers.0.self_attn.q_proj.weight) {layer = "model.layers.0.self_attn.q_proj", phase = backward} : tensor<128x16xbf16>
    %view.36 = aten.view(%mm.23) {layer = "model.layers.0.self_attn.q_proj", phase = backward} : tensor<8x16x16xbf16>
    %add.17 = aten.add.Tensor(%add.16, %view.36) {layer = "model.layers.0.self_attn", phase = backward} : tensor<8x16x16xbf16>
    %mul.36 = aten.mul.Tensor(%add.17, %model.layers.0.input_layernorm.weight) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<8x16x16xbf16>
    %mul.37 = aten.mul.Tensor(%add.17, %_to_copy.4) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<8x16x16xbf16>
    %sum.5 = aten.sum.dim_IntList(%mul.37, dim = [0, 1], keepdim = true) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<1x1x16xbf16>
    %view.37 = aten.view(%sum.5) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<16xbf16>
    %_to_copy.15 = aten._to_copy(%mul.36) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<8x16x16xf32>
    %mul.38 = aten.mul.Tensor(%_to_copy.15, %_to_copy.3) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<8x16x16xf32>
    %mul.39 = aten.mul.Tensor(%_to_copy.15, %rsqrt) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<8x16x16xf32>
    %sum.6 = aten.sum.dim_IntList(%mul.38, dim = [2], keepdim = true) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<8x16x1xf32>
    %pow.8 = aten.pow.Tensor_Scalar(%rsqrt, exponent = 3) {layer = "model.layers.0.input_layernorm", phase = forward} : tensor<8x16x1xf32>
    %mul.40 = aten.mul.Scalar(%sum.6, other = -0.5) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<8x16x1xf32>
    %mul.41 = aten.mul.Tensor(%mul.40, %pow.8) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<8x16x1xf32>
    %expand.3 = aten.expand(%mul.41) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<8x16x16xf32>
    %div.2 = aten.div.Scalar(%expand.3, other = 16) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<8x16x16xf32>
    %pow.9 = aten.pow.Tensor_Scalar(%_to_copy.3, exponent = 1.0) {layer = "model.layers.0.input_layernorm", phase = forward} : tensor<8x16x16xf32>
    %mul.42 = aten.mul.Scalar(%pow.9, other = 2.0) {layer = "model.layers.0.input_layernorm", phase = forward} : tensor<8x16x16xf32>
    %mul.43 = aten.mul.Tensor(%div.2, %mul.42) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<8x16x16xf32>
    %add.18 = aten.add.Tensor(%mul.39, %mul.43) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<8x16x16xf32>
    %_to_copy.16 = aten._to_copy(%add.18) {layer = "model.layers.0.input_layernorm", phase = backward} : tensor<8x16x16xbf16>
    %add.19 = aten.add.Tensor(%add.11, %_to_copy.16) {layer = "model", phase = backward} : tensor<8x16x16xbf16>
    %embedding_dense_backward = aten.embedding_dense_backward(%add.19, %input_ids, padding_idx = -1, scale_grad_by_freq = false) {layer = "model.embed_tokens", phase = backward} : tensor<32x16xbf16>
    func.return %div_3, %embedding_dense_backward, %mm.22, %mm.20, %mm.18, %mm.16, %mm.14, %mm.12, %mm.10, %view.37, %view.25, %view.18, %mm.8 : tensor<f32>, tensor<32x16xbf16>, tensor<16x16xbf16>, tensor<8x16xbf16>, tensor<8x16xbf16>, tensor<16x16xbf16>, tensor<32x16xbf16>, tensor<32x16xbf16>, tensor<16x32xbf16>, tensor<16xbf16>, tensor<16xbf16>, tensor<16xbf16>, tensor<32x16xbf16>
  }
}
