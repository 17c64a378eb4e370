builtin.module {
  func.func @step(%wte.weight: tensor<32x16xf32> {dist.kind = "param", dist.name = "wte.weight", dist.aliases = ["head.weight"]}, %wpe.weight: tensor<8x16xf32> {dist.kind = "param", dist.name = "wpe.weight"}, %h.0.ln_1.weight: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.ln_1.weight"}, %h.0.ln_1.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.ln_1.bias"}, %h.0.attn.q.weight: tensor<16x16xf32> {dist.kind = "param", dist.name = "h.0.attn.q.weight"}, %h.0.attn.q.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.attn.q.bias"}, %h.0.attn.k.weight: tensor<16x16xf32> {dist.kind = "param", dist.name = "h.0.attn.k.weight"}, %h.0.attn.k.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.attn.k.bias"}, %h.0.attn.v.weight: tensor<16x16xf32> {dist.kind = "param", dist.name = "h.0.attn.v.weight"}, %h.0.attn.v.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.attn.v.bias"}, %h.0.attn.proj.weight: tensor<16x16xf32> {dist.kind = "param", dist.name = "h.0.attn.proj.weight"}, %h.0.attn.proj.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.attn.proj.bias"}, %h.0.ln_2.weight: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.ln_2.weight"}, %h.0.ln_2.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.ln_2.bias"}, %h.0.mlp.up: tensor<4x16x64xf32> {dist.kind = "param", dist.name = "h.0.mlp.up"}, %h.0.mlp.up_bias: tensor<4x64xf32> {dist.kind = "param", dist.name = "h.0.mlp.up_bias"}, %h.0.mlp.down: tensor<4x64x16xf32> {dist.kind = "param", dist.name = "h.0.mlp.down"}, %h.0.mlp.down_bias: tensor<4x16xf32> {dist.kind = "param", dist.name = "h.0.mlp.down_bias"}, %h.0.mlp.router.weight: tensor<4x16xf32> {dist.kind = "param", dist.name = "h.0.mlp.router.weight"}, %ln_f.weight: tensor<16xf32> {dist.kind = "param", dist.name = "ln_f.weight"}, %ln_f.bias: tensor<16xf32> {dist.kind = "param", dist.name = "ln_f.bias"}, %h.0.mlp.dropped_choices: tensor<2xi64> {dist.kind = "buffer", dist.name = "h.0.mlp.dropped_choices"}, %input_ids: tensor<8x8xi64> {dist.kind = "input", dist.name = "input_ids"}, %labels: tensor<8x8xi64> {dist.kind = "input", dist.name = "labels"}, %tangent: tensor<f32> {dist.kind = "tangent", dist.name = "loss"}) -> (tensor<2xi64> {dist.kind = "buffer", dist.name = "h.0.mlp.dropped_choices"}, tensor<f32> {dist.kind = "output", dist.name = "0"}, tensor<32x16xf32> {dist.kind = "grad", dist.name = "wte.weight"}, tensor<8x16xf32> {dist.kind = "grad", dist.name = "wpe.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.ln_1.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.ln_1.bias"}, tensor<16x16xf32> {dist.kind = "grad", dist.name = "h.0.attn.q.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.attn.q.bias"}, tensor<16x16xf32> {dist.kind = "grad", dist.name = "h.0.attn.k.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.attn.k.bias"}, tensor<16x16xf32> {dist.kind = "grad", dist.name = "h.0.attn.v.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.attn.v.bias"}, tensor<16x16xf32> {dist.kind = "grad", dist.name = "h.0.attn.proj.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.attn.proj.bias"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.ln_2.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.ln_2.bias"}, tensor<4x16x64xf32> {dist.kind = "grad", dist.name = "h.0.mlp.up"}, tensor<4x64xf32> {dist.kind = "grad", dist.name = "h.0.mlp.up_bias"}, tensor<4x64x16xf32> {dist.kind = "grad", dist.name = "h.0.mlp.down"}, tensor<4x16xf32> {dist.kind = "grad", dist.name = "h.0.mlp.down_bias"}, tensor<4x16xf32> {dist.kind = "grad", dist.name = "h.0.mlp.router.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "ln_f.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "ln_f.bias"}) {
    %arange = aten.arange.start_step(start = 0) {layer = "", phase = forward} : tensor<8xi64>
    %embedding = aten.embedding(%wte.weight, %input_ids) {layer = "wte", phase = forward} : tensor<8x8x16xf32>
    %embedding.1 = aten.embedding(%wpe.weight, %arange) {layer = "wpe", phase = forward} : tensor<8x16xf32>
    %add = aten.add.Tensor(%embedding, %embedding.1) {layer = "", phase = forward} : tensor<8x8x16xf32>
    %native_layer_norm, %native_layer_norm_1, %native_layer_norm_2 = aten.native_layer_norm(%add, %h.0.ln_1.weight, %h.0.ln_1.bias, eps = 1.0e-05) {layer = "h.0.ln_1", phase = forward} : tensor<8x8x16xf32>, tensor<8x8x1xf32>, tensor<8x8x1xf32>
    %view = aten.view(%native_layer_norm) {layer = "h.0.attn.q", phase = forward} : tensor<64x16xf32>
    %permute = aten.permute(%h.0.attn.q.weight, dims = [1, 0]) {layer = "h.0.attn.q", phase = forward} : tensor<16x16xf32>
    %addmm = aten.addmm(%h.0.attn.q.bias, %view, %permute) {layer = "h.0.attn.q", phase = forward} : tensor<64x16xf32>
    %view.2 = aten.view(%addmm) {layer = "h.0.attn", phase = forward} : tensor<8x8x4x4xf32>
    %permute_1 = aten.permute(%view.2, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = forward} : tensor<8x4x8x4xf32>
    %view.3 = aten.view(%native_layer_norm) {layer = "h.0.attn.k", phase = forward} : tensor<64x16xf32>
    %permute_2 = aten.permute(%h.0.attn.k.weight, dims = [1, 0]) {layer = "h.0.attn.k", phase = forward} : tensor<16x16xf32>
    %addmm.1 = aten.addmm(%h.0.attn.k.bias, %view.3, %permute_2) {layer = "h.0.attn.k", phase = forward} : tensor<64x16xf32>
    %view.5 = aten.view(%addmm.1) {layer = "h.0.attn", phase = forward} : tensor<8x8x4x4xf32>
    %permute_3 = aten.permute(%view.5, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = forward} : tensor<8x4x8x4xf32>
    %view.6 = aten.view(%native_layer_norm) {layer = "h.0.attn.v", phase = forward} : tensor<64x16xf32>
    %permute_4 = aten.permute(%h.0.attn.v.weight, dims = [1, 0]) {layer = "h.0.attn.v", phase = forward} : tensor<16x16xf32>
    %addmm.2 = aten.addmm(%h.0.attn.v.bias, %view.6, %permute_4) {layer = "h.0.attn.v", phase = forward} : tensor<64x16xf32>
    %view.8 = aten.view(%addmm.2) {layer = "h.0.attn", phase = forward} : tensor<8x8x4x4xf32>
    %permute_5 = aten.permute(%view.8, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = forward} : tensor<8x4x8x4xf32>
    %_scaled_dot_product_flash_attention_for_cpu, %_scaled_dot_product_flash_attention_for_cpu_1 = aten._scaled_dot_product_flash_attention_for_cpu(%permute_1, %permute_3, %permute_5, is_causal = true) {layer = "h.0.attn", phase = forward} : tensor<8x4x8x4xf32>, tensor<8x4x8xf32>
    %permute_6 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = forward} : tensor<8x8x4x4xf32>
    %view.10 = aten.view(%permute_6) {layer = "h.0.attn.proj", phase = forward} : tensor<64x16xf32>
    %permute_7 = aten.permute(%h.0.attn.proj.weight, dims = [1, 0]) {layer = "h.0.attn.proj", phase = forward} : tensor<16x16xf32>
    %addmm.3 = aten.addmm(%h.0.attn.proj.bias, %view.10, %permute_7) {layer = "h.0.attn.proj", phase = forward} : tensor<64x16xf32>
    %view.11 = aten.view(%addmm.3) {layer = "h.0.attn.proj", phase = forward} : tensor<8x8x16xf32>
    %add.1 = aten.add.Tensor(%add, %view.11) {layer = "h.0", phase = forward} : tensor<8x8x16xf32>
    %native_layer_norm.1, %native_layer_norm.1_1, %native_layer_norm.1_2 = aten.native_layer_norm(%add.1, %h.0.ln_2.weight, %h.0.ln_2.bias, eps = 1.0e-05) {layer = "h.0.ln_2", phase = forward} : tensor<8x8x16xf32>, tensor<8x8x1xf32>, tensor<8x8x1xf32>
    %view.12 = aten.view(%native_layer_norm.1) {layer = "h.0.mlp", phase = forward} : tensor<64x16xf32>
    %permute_8 = aten.permute(%h.0.mlp.router.weight, dims = [1, 0]) {layer = "h.0.mlp.router", phase = forward} : tensor<16x4xf32>
    %mm = aten.mm(%view.12, %permute_8) {layer = "h.0.mlp.router", phase = forward} : tensor<64x4xf32>
    %_softmax = aten._softmax(%mm, dim = -1, half_to_float = false) {layer = "h.0.mlp", phase = forward} : tensor<64x4xf32>
    %topk, %topk_1 = aten.topk(%_softmax, k = 2) {layer = "h.0.mlp", phase = forward} : tensor<64x2xf32>, tensor<64x2xi64>
    %sum.1 = aten.sum.dim_IntList(%topk, dim = [1], keepdim = true) {layer = "h.0.mlp", phase = forward} : tensor<64x1xf32>
    %div = aten.div.Tensor(%topk, %sum.1) {layer = "h.0.mlp", phase = forward} : tensor<64x2xf32>
    %view.13 = aten.view(%topk_1) {layer = "h.0.mlp", phase = forward} : tensor<8x16xi64>
    %view_1 = aten.view(%topk_1) {layer = "h.0.mlp", phase = forward} : tensor<8x16x1xi64>
    %arange.1 = aten.arange.start_step(start = 0) {layer = "h.0.mlp", phase = forward} : tensor<4xi64>
    %eq = aten.eq.Tensor(%view_1, %arange.1) {layer = "h.0.mlp", phase = forward} : tensor<8x16x4xi1>
    %_to_copy = aten._to_copy(%eq) {layer = "h.0.mlp", phase = forward} : tensor<8x16x4xi64>
    %cumsum = aten.cumsum(%_to_copy, dim = 1) {layer = "h.0.mlp", phase = forward} : tensor<8x16x4xi64>
    %mul = aten.mul.Tensor(%cumsum, %_to_copy) {layer = "h.0.mlp", phase = forward} : tensor<8x16x4xi64>
    %sum.2 = aten.sum.dim_IntList(%mul, dim = [2]) {layer = "h.0.mlp", phase = forward} : tensor<8x16xi64>
    %sub = aten.sub.Scalar(%sum.2, other = 1) {layer = "h.0.mlp", phase = forward} : tensor<8x16xi64>
    %lt = aten.lt.Scalar(%sub, other = 4) {layer = "h.0.mlp", phase = forward} : tensor<8x16xi1>
    %mul.1 = aten.mul.Scalar(%view.13, other = 4) {layer = "h.0.mlp", phase = forward} : tensor<8x16xi64>
    %add.2 = aten.add.Tensor(%mul.1, %sub) {layer = "h.0.mlp", phase = forward} : tensor<8x16xi64>
    %arange.2 = aten.arange.start_step(start = 0) {layer = "h.0.mlp", phase = forward} : tensor<16xi64>
    %expand = aten.expand(%arange.2) {layer = "h.0.mlp", phase = forward} : tensor<8x16xi64>
    %full = aten.full(fill_value = 16) {layer = "h.0.mlp", phase = forward} : tensor<8x17xi64>
    %full_1 = aten.full(fill_value = 16) {layer = "h.0.mlp", phase = forward} : tensor<i64>
    %where = aten.where.self(%lt, %add.2, %full_1) {layer = "h.0.mlp", phase = forward} : tensor<8x16xi64>
    %scatter = aten.scatter.src(%full, %where, %expand, dim = 1) {layer = "h.0.mlp", phase = forward} : tensor<8x17xi64>
    %slice.1 = aten.slice.Tensor(%scatter, dim = 1, start = 0) {layer = "h.0.mlp", phase = forward} : tensor<8x16xi64>
    %lt.1 = aten.lt.Scalar(%slice.1, other = 16) {layer = "h.0.mlp", phase = forward} : tensor<8x16xi1>
    %full_2 = aten.full(fill_value = 0) {layer = "h.0.mlp", phase = forward} : tensor<i64>
    %where.1 = aten.where.self(%lt, %add.2, %full_2) {layer = "h.0.mlp", phase = forward} : tensor<8x16xi64>
    %full_3 = aten.full(fill_value = 0) {layer = "h.0.mlp", phase = forward} : tensor<i64>
    %where.2 = aten.where.self(%lt.1, %slice.1, %full_3) {layer = "h.0.mlp", phase = forward} : tensor<8x16xi64>
    %view.14 = aten.view(%div) {layer = "h.0.mlp", phase = forward} : tensor<8x16xf32>
    %gather = aten.gather(%view.14, %where.2, dim = 1) {layer = "h.0.mlp", phase = forward} : tensor<8x16xf32>
    %mul.2 = aten.mul.Tensor(%gather, %lt.1) {layer = "h.0.mlp", phase = forward} : tensor<8x16xf32>
    %full_4 = aten.full(fill_value = 2) {layer = "h.0.mlp", phase = forward} : tensor<i64>
    %floor_divide = aten.floor_divide(%where.2, %full_4) {layer = "h.0.mlp", phase = forward} : tensor<8x16xi64>
    %view_2 = aten.view(%floor_divide) {layer = "h.0.mlp", phase = forward} : tensor<8x16x1xi64>
    %expand.1 = aten.expand(%view_2) {layer = "h.0.mlp", phase = forward} : tensor<8x16x16xi64>
    %gather.1 = aten.gather(%native_layer_norm.1, %expand.1, dim = 1) {layer = "h.0.mlp", phase = forward} : tensor<8x16x16xf32>
    %view.16 = aten.view(%mul.2) {layer = "h.0.mlp", phase = forward} : tensor<8x4x4x1xf32>
    %permute_9 = aten.permute(%view.16, dims = [1, 0, 2, 3]) {layer = "h.0.mlp", phase = forward} : tensor<4x8x4x1xf32>
    %view_3 = aten.view(%permute_9) {layer = "h.0.mlp", phase = forward} : tensor<4x32x1xf32>
    %view.17 = aten.view(%gather.1) {layer = "h.0.mlp", phase = forward} : tensor<8x4x4x16xf32>
    %permute_10 = aten.permute(%view.17, dims = [1, 0, 2, 3]) {layer = "h.0.mlp", phase = forward} : tensor<4x8x4x16xf32>
    %view_4 = aten.view(%permute_10) {layer = "h.0.mlp", phase = forward} : tensor<4x32x16xf32>
    %bmm = aten.bmm(%view_4, %h.0.mlp.up) {layer = "h.0.mlp", phase = forward} : tensor<4x32x64xf32>
    %view_5 = aten.view(%h.0.mlp.up_bias) {layer = "h.0.mlp", phase = forward} : tensor<4x1x64xf32>
    %add.3 = aten.add.Tensor(%bmm, %view_5) {layer = "h.0.mlp", phase = forward} : tensor<4x32x64xf32>
    %gelu = aten.gelu(%add.3, approximate = "tanh") {layer = "h.0.mlp", phase = forward} : tensor<4x32x64xf32>
    %bmm.1 = aten.bmm(%gelu, %h.0.mlp.down) {layer = "h.0.mlp", phase = forward} : tensor<4x32x16xf32>
    %view_6 = aten.view(%h.0.mlp.down_bias) {layer = "h.0.mlp", phase = forward} : tensor<4x1x16xf32>
    %add.4 = aten.add.Tensor(%bmm.1, %view_6) {layer = "h.0.mlp", phase = forward} : tensor<4x32x16xf32>
    %mul.3 = aten.mul.Tensor(%add.4, %view_3) {layer = "h.0.mlp", phase = forward} : tensor<4x32x16xf32>
    %view.18 = aten.view(%mul.3) {layer = "h.0.mlp", phase = forward} : tensor<4x8x4x16xf32>
    %permute_11 = aten.permute(%view.18, dims = [1, 0, 2, 3]) {layer = "h.0.mlp", phase = forward} : tensor<8x4x4x16xf32>
    %view_7 = aten.view(%where.1) {layer = "h.0.mlp", phase = forward} : tensor<8x16x1xi64>
    %expand.2 = aten.expand(%view_7) {layer = "h.0.mlp", phase = forward} : tensor<8x16x16xi64>
    %view_8 = aten.view(%permute_11) {layer = "h.0.mlp", phase = forward} : tensor<8x16x16xf32>
    %gather.2 = aten.gather(%view_8, %expand.2, dim = 1) {layer = "h.0.mlp", phase = forward} : tensor<8x16x16xf32>
    %view_9 = aten.view(%lt) {layer = "h.0.mlp", phase = forward} : tensor<8x16x1xi1>
    %bitwise_not = aten.bitwise_not(%view_9) {layer = "h.0.mlp", phase = forward} : tensor<8x16x1xi1>
    %masked_fill = aten.masked_fill.Scalar(%gather.2, %bitwise_not, value = 0) {layer = "h.0.mlp", phase = forward} : tensor<8x16x16xf32>
    %bitwise_not.1 = aten.bitwise_not(%lt) {layer = "h.0.mlp", phase = forward} : tensor<8x16xi1>
    %sum.3 = aten.sum.dim_IntList(%bitwise_not.1, dim = [0, 1]) {layer = "h.0.mlp", phase = forward} : tensor<i64>
    %full_like = aten.full(fill_value = 128) {layer = "h.0.mlp", phase = forward} : tensor<i64>
    %view_10 = aten.view(%sum.3) {layer = "h.0.mlp", phase = forward} : tensor<1xi64>
    %view_11 = aten.view(%full_like) {layer = "h.0.mlp", phase = forward} : tensor<1xi64>
    %cat = aten.cat([%view_10, %view_11]) {layer = "h.0.mlp", phase = forward} : tensor<2xi64>
    %view.19 = aten.view(%masked_fill) {layer = "h.0.mlp", phase = forward} : tensor<64x2x16xf32>
    %sum.4 = aten.sum.dim_IntList(%view.19, dim = [1]) {layer = "h.0.mlp", phase = forward} : tensor<64x16xf32>
    %view.20 = aten.view(%sum.4) {layer = "h.0.mlp", phase = forward} : tensor<8x8x16xf32>
    %add.5 = aten.add.Tensor(%add.1, %view.20) {layer = "h.0", phase = forward} : tensor<8x8x16xf32>
    %native_layer_norm.2, %native_layer_norm.2_1, %native_layer_norm.2_2 = aten.native_layer_norm(%add.5, %ln_f.weight, %ln_f.bias, eps = 1.0e-05) {layer = "ln_f", phase = forward} : tensor<8x8x16xf32>, tensor<8x8x1xf32>, tensor<8x8x1xf32>
    %permute_12 = aten.permute(%wte.weight, dims = [1, 0]) {layer = "head", phase = forward} : tensor<16x32xf32>
    %view.21 = aten.view(%native_layer_norm.2) {layer = "head", phase = forward} : tensor<64x16xf32>
    %mm.1 = aten.mm(%view.21, %permute_12) {layer = "head", phase = forward} : tensor<64x32xf32>
    %amax = aten.amax(%mm.1, dim = [1], keepdim = true) {layer = "", phase = forward} : tensor<64x1xf32>
    %sub_1 = aten.sub.Tensor(%mm.1, %amax) {layer = "", phase = forward} : tensor<64x32xf32>
    %exp = aten.exp(%sub_1) {layer = "", phase = forward} : tensor<64x32xf32>
    %sum = aten.sum.dim_IntList(%exp, dim = [1], keepdim = true) {layer = "", phase = forward} : tensor<64x1xf32>
    %_log_softmax = aten.log(%sum) {layer = "", phase = forward} : tensor<64x1xf32>
    %sub_2 = aten.sub.Tensor(%sub_1, %_log_softmax) {layer = "", phase = forward} : tensor<64x32xf32>
    %view_12 = aten.view(%labels) {layer = "", phase = forward} : tensor<64x1xi64>
    %ne = aten.ne.Scalar(%view_12, other = -100) {layer = "", phase = forward} : tensor<64x1xi1>
    %full_5 = aten.full(fill_value = 0) {layer = "", phase = forward} : tensor<i64>
    %where_1 = aten.where.self(%ne, %view_12, %full_5) {layer = "", phase = forward} : tensor<64x1xi64>
    %gather_1 = aten.gather(%sub_2, %where_1, dim = 1) {layer = "", phase = forward} : tensor<64x1xf32>
    %view_13 = aten.view(%labels) {layer = "", phase = forward} : tensor<64x1xi64>
    %eq_1 = aten.eq.Scalar(%view_13, other = -100) {layer = "", phase = forward} : tensor<64x1xi1>
    %neg = aten.neg(%gather_1) {layer = "", phase = forward} : tensor<64x1xf32>
    %masked_fill_1 = aten.masked_fill.Scalar(%neg, %eq_1, value = 0.0) {layer = "", phase = forward} : tensor<64x1xf32>
    %to_copy = aten._to_copy(%ne) {layer = "", phase = forward} : tensor<64x1xf32>
    %sum_1 = aten.sum.dim_IntList(%to_copy, dim = [0, 1]) {layer = "", phase = forward} : tensor<f32>
    %sum_2 = aten.sum.dim_IntList(%masked_fill_1, dim = [0, 1]) {layer = "", phase = forward} : tensor<f32>
    %div_1 = aten.div.Tensor(%sum_2, %sum_1) {layer = "", phase = forward} : tensor<f32>
    %view_14 = aten.view(%labels) {layer = "", phase = forward} : tensor<64x1xi64>
    %ne_1 = aten.ne.Scalar(%view_14, other = -100) {layer = "", phase = forward} : tensor<64x1xi1>
    %full_6 = aten.full(fill_value = 0) {layer = "", phase = forward} : tensor<i64>
    %where_2 = aten.where.self(%ne_1, %view_14, %full_6) {layer = "", phase = forward} : tensor<64x1xi64>
    %div_2 = aten.div.Tensor(%tangent, %sum_1) {layer = "", phase = backward} : tensor<f32>
    %full_7 = aten.full(fill_value = 0.0) {layer = "", phase = forward} : tensor<f32>
    %neg_1 = aten.neg(%div_2) {layer = "", phase = backward} : tensor<f32>
    %where_3 = aten.where.self(%ne_1, %neg_1, %full_7) {layer = "", phase = backward} : tensor<64x1xf32>
    %exp_1 = aten.exp(%sub_2) {layer = "", phase = forward} : tensor<64x32xf32>
    %neg_2 = aten.neg(%where_3) {layer = "", phase = backward} : tensor<64x1xf32>
    %mul_1 = aten.mul.Tensor(%exp_1, %neg_2) {layer = "", phase = backward} : tensor<64x32xf32>
    %scatter_add = aten.scatter_add(%mul_1, %where_2, %where_3, dim = 1) {layer = "", phase = backward} : tensor<64x32xf32>
    %permute_13 = aten.permute(%scatter_add, dims = [1, 0]) {layer = "head", phase = backward} : tensor<32x64xf32>
    %mm.2 = aten.mm(%permute_13, %view.21) {layer = "head", phase = backward} : tensor<32x16xf32>
    %mm.3 = aten.mm(%scatter_add, %wte.weight) {layer = "head", phase = backward} : tensor<64x16xf32>
    %view.26 = aten.view(%mm.3) {layer = "head", phase = backward} : tensor<8x8x16xf32>
    %native_layer_norm_backward, %native_layer_norm_backward_1, %native_layer_norm_backward_2 = aten.native_layer_norm_backward(%view.26, %add.5, %native_layer_norm.2_1, %native_layer_norm.2_2, %ln_f.weight, %ln_f.bias, output_mask = [true, true, true]) {layer = "ln_f", phase = backward} : tensor<8x8x16xf32>, tensor<16xf32>, tensor<16xf32>
    %view_15 = aten.view(%native_layer_norm_backward) {layer = "h.0.mlp", phase = backward} : tensor<64x1x16xf32>
    %expand.3 = aten.expand(%view_15) {layer = "h.0.mlp", phase = backward} : tensor<64x2x16xf32>
    %view_16 = aten.view(%expand.3) {layer = "h.0.mlp", phase = backward} : tensor<8x16x16xf32>
    %masked_fill.1 = aten.masked_fill.Scalar(%view_16, %bitwise_not, value = 0) {layer = "h.0.mlp", phase = backward} : tensor<8x16x16xf32>
    %full_8 = aten.full(fill_value = 0.0) {layer = "h.0.mlp", phase = forward} : tensor<8x16x16xf32>
    %scatter_add_1 = aten.scatter_add(%full_8, %expand.2, %masked_fill.1, dim = 1) {layer = "h.0.mlp", phase = backward} : tensor<8x16x16xf32>
    %view.28 = aten.view(%scatter_add_1) {layer = "h.0.mlp", phase = backward} : tensor<8x4x4x16xf32>
    %permute_14 = aten.permute(%view.28, dims = [1, 0, 2, 3]) {layer = "h.0.mlp", phase = backward} : tensor<4x8x4x16xf32>
    %view_17 = aten.view(%permute_14) {layer = "h.0.mlp", phase = backward} : tensor<4x32x16xf32>
    %mul.4 = aten.mul.Tensor(%view_17, %add.4) {layer = "h.0.mlp", phase = backward} : tensor<4x32x16xf32>
    %mul.5 = aten.mul.Tensor(%view_17, %view_3) {layer = "h.0.mlp", phase = backward} : tensor<4x32x16xf32>
    %sum.5 = aten.sum.dim_IntList(%mul.4, dim = [2], keepdim = true) {layer = "h.0.mlp", phase = backward} : tensor<4x32x1xf32>
    %sum.6 = aten.sum.dim_IntList(%mul.5, dim = [1], keepdim = true) {layer = "h.0.mlp", phase = backward} : tensor<4x1x16xf32>
    %view_18 = aten.view(%sum.6) {layer = "h.0.mlp", phase = backward} : tensor<4x16xf32>
    %permute_15 = aten.permute(%gelu, dims = [0, 2, 1]) {layer = "h.0.mlp", phase = forward} : tensor<4x64x32xf32>
    %bmm.2 = aten.bmm(%permute_15, %mul.5) {layer = "h.0.mlp", phase = backward} : tensor<4x64x16xf32>
    %permute_16 = aten.permute(%h.0.mlp.down, dims = [0, 2, 1]) {layer = "h.0.mlp", phase = forward} : tensor<4x16x64xf32>
    %bmm.3 = aten.bmm(%mul.5, %permute_16) {layer = "h.0.mlp", phase = backward} : tensor<4x32x64xf32>
    %gelu_backward = aten.gelu_backward(%bmm.3, %add.3, approximate = "tanh") {layer = "h.0.mlp", phase = backward} : tensor<4x32x64xf32>
    %sum.7 = aten.sum.dim_IntList(%gelu_backward, dim = [1], keepdim = true) {layer = "h.0.mlp", phase = backward} : tensor<4x1x64xf32>
    %view_19 = aten.view(%sum.7) {layer = "h.0.mlp", phase = backward} : tensor<4x64xf32>
    %permute_17 = aten.permute(%view_4, dims = [0, 2, 1]) {layer = "h.0.mlp", phase = forward} : tensor<4x16x32xf32>
    %bmm.4 = aten.bmm(%permute_17, %gelu_backward) {layer = "h.0.mlp", phase = backward} : tensor<4x16x64xf32>
    %permute_18 = aten.permute(%h.0.mlp.up, dims = [0, 2, 1]) {layer = "h.0.mlp", phase = forward} : tensor<4x64x16xf32>
    %bmm.5 = aten.bmm(%gelu_backward, %permute_18) {layer = "h.0.mlp", phase = backward} : tensor<4x32x16xf32>
    %view.29 = aten.view(%bmm.5) {layer = "h.0.mlp", phase = backward} : tensor<4x8x4x16xf32>
    %permute_19 = aten.permute(%view.29, dims = [1, 0, 2, 3]) {layer = "h.0.mlp", phase = backward} : tensor<8x4x4x16xf32>
    %view_20 = aten.view(%permute_19) {layer = "h.0.mlp", phase = backward} : tensor<8x16x16xf32>
    %view.30 = aten.view(%sum.5) {layer = "h.0.mlp", phase = backward} : tensor<4x8x4x1xf32>
    %permute_20 = aten.permute(%view.30, dims = [1, 0, 2, 3]) {layer = "h.0.mlp", phase = backward} : tensor<8x4x4x1xf32>
    %view_21 = aten.view(%permute_20) {layer = "h.0.mlp", phase = backward} : tensor<8x16xf32>
    %full_9 = aten.full(fill_value = 0.0) {layer = "h.0.mlp", phase = forward} : tensor<8x8x16xf32>
    %scatter_add.1 = aten.scatter_add(%full_9, %expand.1, %view_20, dim = 1) {layer = "h.0.mlp", phase = backward} : tensor<8x8x16xf32>
    %view.31 = aten.view(%scatter_add.1) {layer = "h.0.mlp", phase = backward} : tensor<64x16xf32>
    %mul.6 = aten.mul.Tensor(%view_21, %lt.1) {layer = "h.0.mlp", phase = backward} : tensor<8x16xf32>
    %full_10 = aten.full(fill_value = 0.0) {layer = "h.0.mlp", phase = forward} : tensor<8x16xf32>
    %scatter_add.2 = aten.scatter_add(%full_10, %where.2, %mul.6, dim = 1) {layer = "h.0.mlp", phase = backward} : tensor<8x16xf32>
    %view.32 = aten.view(%scatter_add.2) {layer = "h.0.mlp", phase = backward} : tensor<64x2xf32>
    %div.1 = aten.div.Tensor(%topk, %sum.1) {layer = "h.0.mlp", phase = forward} : tensor<64x2xf32>
    %div.2 = aten.div.Tensor(%div.1, %sum.1) {layer = "h.0.mlp", phase = forward} : tensor<64x2xf32>
    %neg_3 = aten.neg(%view.32) {layer = "h.0.mlp", phase = backward} : tensor<64x2xf32>
    %mul.7 = aten.mul.Tensor(%neg_3, %div.2) {layer = "h.0.mlp", phase = backward} : tensor<64x2xf32>
    %div.3 = aten.div.Tensor(%view.32, %sum.1) {layer = "h.0.mlp", phase = backward} : tensor<64x2xf32>
    %sum.8 = aten.sum.dim_IntList(%mul.7, dim = [1], keepdim = true) {layer = "h.0.mlp", phase = backward} : tensor<64x1xf32>
    %expand.4 = aten.expand(%sum.8) {layer = "h.0.mlp", phase = backward} : tensor<64x2xf32>
    %add.6 = aten.add.Tensor(%div.3, %expand.4) {layer = "h.0.mlp", phase = backward} : tensor<64x2xf32>
    %full_11 = aten.full(fill_value = 0.0) {layer = "h.0.mlp", phase = forward} : tensor<64x4xf32>
    %scatter.1 = aten.scatter.src(%full_11, %topk_1, %add.6, dim = -1) {layer = "h.0.mlp", phase = backward} : tensor<64x4xf32>
    %_softmax_backward_data = aten._softmax_backward_data(%scatter.1, %_softmax, dim = -1, input_dtype = f32) {layer = "h.0.mlp", phase = backward} : tensor<64x4xf32>
    %permute_21 = aten.permute(%_softmax_backward_data, dims = [1, 0]) {layer = "h.0.mlp.router", phase = backward} : tensor<4x64xf32>
    %mm.4 = aten.mm(%permute_21, %view.12) {layer = "h.0.mlp.router", phase = backward} : tensor<4x16xf32>
    %mm.5 = aten.mm(%_softmax_backward_data, %h.0.mlp.router.weight) {layer = "h.0.mlp.router", phase = backward} : tensor<64x16xf32>
    %add.7 = aten.add.Tensor(%view.31, %mm.5) {layer = "h.0.mlp", phase = backward} : tensor<64x16xf32>
    %view.33 = aten.view(%add.7) {layer = "h.0.mlp", phase = backward} : tensor<8x8x16xf32>
    %native_layer_norm_backward.1, %native_layer_norm_backward.1_1, %native_layer_norm_backward.1_2 = aten.native_layer_norm_backward(%view.33, %add.1, %native_layer_norm.1_1, %native_layer_norm.1_2, %h.0.ln_2.weight, %h.0.ln_2.bias, output_mask = [true, true, true]) {layer = "h.0.ln_2", phase = backward} : tensor<8x8x16xf32>, tensor<16xf32>, tensor<16xf32>
    %add.8 = aten.add.Tensor(%native_layer_norm_backward, %native_layer_norm_backward.1) {layer = "", phase = backward} : tensor<8x8x16xf32>
    %view.34 = aten.view(%add.8) {layer = "h.0.attn.proj", phase = backward} : tensor<64x16xf32>
    %mm.6 = aten.mm(%view.34, %h.0.attn.proj.weight) {layer = "h.0.attn.proj", phase = backward} : tensor<64x16xf32>
    %permute_22 = aten.permute(%view.34, dims = [1, 0]) {layer = "h.0.attn.proj", phase = backward} : tensor<16x64xf32>
    %mm.7 = aten.mm(%permute_22, %view.10) {layer = "h.0.attn.proj", phase = backward} : tensor<16x16xf32>
    %sum.9 = aten.sum.dim_IntList(%view.34, dim = [0], keepdim = true) {layer = "h.0.attn.proj", phase = backward} : tensor<1x16xf32>
    %view.35 = aten.view(%sum.9) {layer = "h.0.attn.proj", phase = backward} : tensor<16xf32>
    %view.37 = aten.view(%mm.6) {layer = "h.0.attn", phase = backward} : tensor<8x8x4x4xf32>
    %permute_23 = aten.permute(%view.37, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = backward} : tensor<8x4x8x4xf32>
    %_scaled_dot_product_flash_attention_for_cpu_backward, %_scaled_dot_product_flash_attention_for_cpu_backward_1, %_scaled_dot_product_flash_attention_for_cpu_backward_2 = aten._scaled_dot_product_flash_attention_for_cpu_backward(%permute_23, %permute_1, %permute_3, %permute_5, %_scaled_dot_product_flash_attention_for_cpu, %_scaled_dot_product_flash_attention_for_cpu_1, dropout_p = 0.0, is_causal = true) {layer = "h.0.attn", phase = backward} : tensor<8x4x8x4xf32>, tensor<8x4x8x4xf32>, tensor<8x4x8x4xf32>
    %permute_24 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu_backward_2, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = backward} : tensor<8x8x4x4xf32>
    %view.39 = aten.view(%permute_24) {layer = "h.0.attn.v", phase = backward} : tensor<64x16xf32>
    %mm.8 = aten.mm(%view.39, %h.0.attn.v.weight) {layer = "h.0.attn.v", phase = backward} : tensor<64x16xf32>
    %permute_25 = aten.permute(%view.39, dims = [1, 0]) {layer = "h.0.attn.v", phase = backward} : tensor<16x64xf32>
    %mm.9 = aten.mm(%permute_25, %view.6) {layer = "h.0.attn.v", phase = backward} : tensor<16x16xf32>
    %sum.10 = aten.sum.dim_IntList(%view.39, dim = [0], keepdim = true) {layer = "h.0.attn.v", phase = backward} : tensor<1x16xf32>
    %view.40 = aten.view(%sum.10) {layer = "h.0.attn.v", phase = backward} : tensor<16xf32>
    %view.41 = aten.view(%mm.8) {layer = "h.0.attn.v", phase = backward} : tensor<8x8x16xf32>
    %permute_26 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu_backward_1, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = backward} : tensor<8x8x4x4xf32>
    %view.43 = aten.view(%permute_26) {layer = "h.0.attn.k", phase = backward} : tensor<64x16xf32>
    %mm.10 = aten.mm(%view.43, %h.0.attn.k.weight) {layer = "h.0.attn.k", phase = backward} : tensor<64x16xf32>
    %permute_27 = aten.permute(%view.43, dims = [1, 0]) {layer = "h.0.attn.k", phase = backward} : tensor<16x64xf32>
    %mm.11 = aten.mm(%permute_27, %view.3) {layer = "h.0.attn.k", phase = backward} : tensor<16x16xf32>
    %sum.11 = aten.sum.dim_IntList(%view.43, dim = [0], keepdim = true) {layer = "h.0.attn.k", phase = backward} : tensor<1x16xf32>
    %view.44 = aten.view(%sum.11) {layer = "h.0.attn.k", phase = backward} : tensor<16xf32>
    %view.45 = aten.view(%mm.10) {layer = "h.0.attn.k", phase = backward} : tensor<8x8x16xf32>
    %add.9 = aten.add.Tensor(%view.41, %view.45) {layer = "h.0.attn", phase = backward} : tensor<8x8x16xf32>
    %permute_28 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu_backward, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = backward} : tensor<8x8x4x4xf32>
    %view.47 = aten.view(%permute_28) {layer = "h.0.attn.q", phase = backward} : tensor<64x16xf32>
    %mm.12 = aten.mm(%view.47, %h.0.attn.q.weight) {layer = "h.0.attn.q", phase = backward} : tensor<64x16xf32>
    %permute_29 = aten.permute(%view.47, dims = [1, 0]) {layer = "h.0.attn.q", phase = backward} : tensor<16x64xf32>
    %mm.13 = aten.mm(%permute_29, %view) {layer = "h.0.attn.q", phase = backward} : tensor<16x16xf32>
    %sum.12 = aten.sum.dim_IntList(%view.47, dim = [0], keepdim = true) {layer = "h.0.attn.q", phase = backward} : tensor<1x16xf32>
    %view.48 = aten.view(%sum.12) {layer = "h.0.attn.q", phase = backward} : tensor<16xf32>
    %view.49 = aten.view(%mm.12) {layer = "h.0.attn.q", phase = backward} : tensor<8x8x16xf32>
    %add.10 = aten.add.Tensor(%add.9, %view.49) {layer = "h.0.attn", phase = backward} : tensor<8x8x16xf32>
    %native_layer_norm_backward.2, %native_layer_norm_backward.2_1, %native_layer_norm_backward.2_2 = aten.native_layer_norm_backward(%add.10, %add, %native_layer_norm_1, %native_layer_norm_2, %h.0.ln_1.weight, %h.0.ln_1.bias, output_mask = [true, true, true]) {layer = "h.0.ln_1", phase = backward} : tensor<8x8x16xf32>, tensor<16xf32>, tensor<16xf32>
    %add.11 = aten.add.Tensor(%add.8, %native_layer_norm_backward.2) {layer = "", phase = backward} : tensor<8x8x16xf32>
    %sum.13 = aten.sum.dim_IntList(%add.11, dim = [0], keepdim = true) {layer = "", phase = backward} : tensor<1x8x16xf32>
    %view.50 = aten.view(%sum.13) {layer = "", phase = backward} : tensor<8x16xf32>
    %embedding_dense_backward = aten.embedding_dense_backward(%view.50, %arange, padding_idx = -1, scale_grad_by_freq = false) {layer = "wpe", phase = backward} : tensor<8x16xf32>
    %embedding_dense_backward.1 = aten.embedding_dense_backward(%add.11, %input_ids, padding_idx = -1, scale_grad_by_freq = false) {layer = "wte", phase = backward} : tensor<32x16xf32>
    %add.12 = aten.add.Tensor(%mm.2, %embedding_dense_backward.1) {layer = "", phase = backward} : tensor<32x16xf32>
    func.return %cat, %div_1, %add.12, %embedding_dense_backward, %native_layer_norm_backward.2_1, %native_layer_norm_backward.2_2, %mm.13, %view.48, %mm.11, %view.44, %mm.9, %view.40, %mm.7, %view.35, %native_layer_norm_backward.1_1, %native_layer_norm_backward.1_2, %bmm.4, %view_19, %bmm.2, %view_18, %mm.4, %native_layer_norm_backward_1, %native_layer_norm_backward_2 : tensor<2xi64>, tensor<f32>, tensor<32x16xf32>, tensor<8x16xf32>, tensor<16xf32>, tensor<16xf32>, tensor<16x16xf32>, tensor<16xf32>, tensor<16x16xf32>, tensor<16xf32>, tensor<16x16xf32>, tensor<16xf32>, tensor<16x16xf32>, tensor<16xf32>, tensor<16xf32>, tensor<16xf32>, tensor<4x16x64xf32>, tensor<4x64xf32>, tensor<4x64x16xf32>, tensor<4x16xf32>, tensor<4x16xf32>, tensor<16xf32>, tensor<16xf32>
  }
}
