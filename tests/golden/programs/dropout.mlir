builtin.module {
  func.func @step(%wte.weight: tensor<32x16xf32> {dist.kind = "param", dist.name = "wte.weight", dist.aliases = ["head.weight"]}, %wpe.weight: tensor<8x16xf32> {dist.kind = "param", dist.name = "wpe.weight"}, %h.0.ln_1.weight: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.ln_1.weight"}, %h.0.ln_1.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.ln_1.bias"}, %h.0.attn.q.weight: tensor<16x16xf32> {dist.kind = "param", dist.name = "h.0.attn.q.weight"}, %h.0.attn.q.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.attn.q.bias"}, %h.0.attn.k.weight: tensor<16x16xf32> {dist.kind = "param", dist.name = "h.0.attn.k.weight"}, %h.0.attn.k.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.attn.k.bias"}, %h.0.attn.v.weight: tensor<16x16xf32> {dist.kind = "param", dist.name = "h.0.attn.v.weight"}, %h.0.attn.v.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.attn.v.bias"}, %h.0.attn.proj.weight: tensor<16x16xf32> {dist.kind = "param", dist.name = "h.0.attn.proj.weight"}, %h.0.attn.proj.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.attn.proj.bias"}, %h.0.ln_2.weight: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.ln_2.weight"}, %h.0.ln_2.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.ln_2.bias"}, %h.0.mlp.fc_in.weight: tensor<64x16xf32> {dist.kind = "param", dist.name = "h.0.mlp.fc_in.weight"}, %h.0.mlp.fc_in.bias: tensor<64xf32> {dist.kind = "param", dist.name = "h.0.mlp.fc_in.bias"}, %h.0.mlp.fc_out.weight: tensor<16x64xf32> {dist.kind = "param", dist.name = "h.0.mlp.fc_out.weight"}, %h.0.mlp.fc_out.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.mlp.fc_out.bias"}, %ln_f.weight: tensor<16xf32> {dist.kind = "param", dist.name = "ln_f.weight"}, %ln_f.bias: tensor<16xf32> {dist.kind = "param", dist.name = "ln_f.bias"}, %input_ids: tensor<8x8xi64> {dist.kind = "input", dist.name = "input_ids"}, %labels: tensor<8x8xi64> {dist.kind = "input", dist.name = "labels"}, %tangent: tensor<f32> {dist.kind = "tangent", dist.name = "loss"}, %random_state: tensor<2xi64> {dist.kind = "buffer", dist.name = "random_state"}) -> (tensor<f32> {dist.kind = "output", dist.name = "0"}, tensor<32x16xf32> {dist.kind = "grad", dist.name = "wte.weight"}, tensor<8x16xf32> {dist.kind = "grad", dist.name = "wpe.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.ln_1.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.ln_1.bias"}, tensor<16x16xf32> {dist.kind = "grad", dist.name = "h.0.attn.q.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.attn.q.bias"}, tensor<16x16xf32> {dist.kind = "grad", dist.name = "h.0.attn.k.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.attn.k.bias"}, tensor<16x16xf32> {dist.kind = "grad", dist.name = "h.0.attn.v.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.attn.v.bias"}, tensor<16x16xf32> {dist.kind = "grad", dist.name = "h.0.attn.proj.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.attn.proj.bias"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.ln_2.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.ln_2.bias"}, tensor<64x16xf32> {dist.kind = "grad", dist.name = "h.0.mlp.fc_in.weight"}, tensor<64xf32> {dist.kind = "grad", dist.name = "h.0.mlp.fc_in.bias"}, tensor<16x64xf32> {dist.kind = "grad", dist.name = "h.0.mlp.fc_out.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.mlp.fc_out.bias"}, tensor<16xf32> {dist.kind = "grad", dist.name = "ln_f.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "ln_f.bias"}, tensor<2xi64> {dist.kind = "buffer", dist.name = "random_state"}) {
    %arange = aten.arange.start_step(start = 0) {layer = "", phase = forward} : tensor<8xi64>
    %embedding = aten.embedding(%wte.weight, %input_ids) {layer = "wte", phase = forward} : tensor<8x8x16xf32>
    %embedding.1 = aten.embedding(%wpe.weight, %arange) {layer = "wpe", phase = forward} : tensor<8x16xf32>
    %add = aten.add.Tensor(%embedding, %embedding.1) {layer = "", phase = forward} : tensor<8x8x16xf32>
    %arange_1 = aten.arange.start_step(start = 0, step = 32) {layer = "drop", phase = forward} : tensor<8xi64>
    %arange_2 = aten.arange.start_step(start = 0, step = 4) {layer = "drop", phase = forward} : tensor<8xi64>
    %arange_3 = aten.arange.start_step(start = 0) {layer = "drop", phase = forward} : tensor<16xi64>
    %random = dist.random(%random_state, [%arange_1, %arange_2, %arange_3], draw = 0) {layer = "drop", phase = forward} : tensor<8x8x16xf32>
    %lt = aten.lt.Scalar(%random, other = 0.9) {layer = "drop", phase = forward} : tensor<8x8x16xi1>
    %to_copy = aten._to_copy(%lt) {layer = "drop", phase = forward} : tensor<8x8x16xf32>
    %mul = aten.mul.Tensor(%add, %to_copy) {layer = "drop", phase = forward} : tensor<8x8x16xf32>
    %mul_1 = aten.mul.Scalar(%mul, other = 1.1111111111111112) {layer = "drop", phase = forward} : tensor<8x8x16xf32>
    %native_layer_norm, %native_layer_norm_1, %native_layer_norm_2 = aten.native_layer_norm(%mul_1, %h.0.ln_1.weight, %h.0.ln_1.bias, eps = 1.0e-05) {layer = "h.0.ln_1", phase = forward} : tensor<8x8x16xf32>, tensor<8x8x1xf32>, tensor<8x8x1xf32>
    %view = aten.view(%native_layer_norm) {layer = "h.0.attn.q", phase = forward} : tensor<64x16xf32>
    %permute = aten.permute(%h.0.attn.q.weight, dims = [1, 0]) {layer = "h.0.attn.q", phase = forward} : tensor<16x16xf32>
    %addmm = aten.addmm(%h.0.attn.q.bias, %view, %permute) {layer = "h.0.attn.q", phase = forward} : tensor<64x16xf32>
    %view.2 = aten.view(%addmm) {layer = "h.0.attn", phase = forward} : tensor<8x8x4x4xf32>
    %permute_1 = aten.permute(%view.2, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = forward} : tensor<8x4x8x4xf32>
    %view.3 = aten.view(%native_layer_norm) {layer = "h.0.attn.k", phase = forward} : tensor<64x16xf32>
    %permute_2 = aten.permute(%h.0.attn.k.weight, dims = [1, 0]) {layer = "h.0.attn.k", phase = forward} : tensor<16x16xf32>
    %addmm.1 = aten.addmm(%h.0.attn.k.bias, %view.3, %permute_2) {layer = "h.0.attn.k", phase = forward} : tensor<64x16xf32>
    %view.5 = aten.view(%addmm.1) {layer = "h.0.attn", phase = forward} : tensor<8x8x4x4xf32>
    %view.6 = aten.view(%native_layer_norm) {layer = "h.0.attn.v", phase = forward} : tensor<64x16xf32>
    %permute_3 = aten.permute(%h.0.attn.v.weight, dims = [1, 0]) {layer = "h.0.attn.v", phase = forward} : tensor<16x16xf32>
    %addmm.2 = aten.addmm(%h.0.attn.v.bias, %view.6, %permute_3) {layer = "h.0.attn.v", phase = forward} : tensor<64x16xf32>
    %view.8 = aten.view(%addmm.2) {layer = "h.0.attn", phase = forward} : tensor<8x8x4x4xf32>
    %permute_4 = aten.permute(%view.8, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = forward} : tensor<8x4x8x4xf32>
    %mul_2 = aten.mul.Scalar(%permute_1, other = 0.7071067811865476) {layer = "h.0.attn", phase = forward} : tensor<8x4x8x4xf32>
    %full = aten.full(fill_value = true) {layer = "h.0.attn", phase = forward} : tensor<8x8xi1>
    %tril = aten.tril(%full) {layer = "h.0.attn", phase = forward} : tensor<8x8xi1>
    %full_1 = aten.full(fill_value = -inf) {layer = "h.0.attn", phase = forward} : tensor<f32>
    %full_2 = aten.full(fill_value = 0.0) {layer = "h.0.attn", phase = forward} : tensor<f32>
    %where = aten.where.self(%tril, %full_2, %full_1) {layer = "h.0.attn", phase = forward} : tensor<8x8xf32>
    %permute_5 = aten.permute(%view.5, dims = [0, 2, 3, 1]) {layer = "h.0.attn", phase = forward} : tensor<8x4x4x8xf32>
    %mul.1 = aten.mul.Scalar(%permute_5, other = 0.7071067811865476) {layer = "h.0.attn", phase = forward} : tensor<8x4x4x8xf32>
    %view_1 = aten.view(%mul_2) {layer = "h.0.attn", phase = forward} : tensor<32x8x4xf32>
    %view_2 = aten.view(%mul.1) {layer = "h.0.attn", phase = forward} : tensor<32x4x8xf32>
    %bmm = aten.bmm(%view_1, %view_2) {layer = "h.0.attn", phase = forward} : tensor<32x8x8xf32>
    %view.9 = aten.view(%bmm) {layer = "h.0.attn", phase = forward} : tensor<8x4x8x8xf32>
    %add.1 = aten.add.Tensor(%view.9, %where) {layer = "h.0.attn", phase = forward} : tensor<8x4x8x8xf32>
    %_safe_softmax = aten._safe_softmax(%add.1, dim = -1) {layer = "h.0.attn", phase = forward} : tensor<8x4x8x8xf32>
    %arange_4 = aten.arange.start_step(start = 0, step = 64) {layer = "h.0.attn", phase = forward} : tensor<8xi64>
    %arange_5 = aten.arange.start_step(start = 0, step = 16) {layer = "h.0.attn", phase = forward} : tensor<4xi64>
    %arange_6 = aten.arange.start_step(start = 0, step = 2) {layer = "h.0.attn", phase = forward} : tensor<8xi64>
    %arange_7 = aten.arange.start_step(start = 0) {layer = "h.0.attn", phase = forward} : tensor<8xi64>
    %random_1 = dist.random(%random_state, [%arange_4, %arange_5, %arange_6, %arange_7], draw = 1) {layer = "h.0.attn", phase = forward} : tensor<8x4x8x8xf32>
    %lt_1 = aten.lt.Scalar(%random_1, other = 0.9) {layer = "h.0.attn", phase = forward} : tensor<8x4x8x8xi1>
    %to_copy_1 = aten._to_copy(%lt_1) {layer = "h.0.attn", phase = forward} : tensor<8x4x8x8xf32>
    %mul_3 = aten.mul.Tensor(%_safe_softmax, %to_copy_1) {layer = "h.0.attn", phase = forward} : tensor<8x4x8x8xf32>
    %mul_4 = aten.mul.Scalar(%mul_3, other = 1.1111111111111112) {layer = "h.0.attn", phase = forward} : tensor<8x4x8x8xf32>
    %view.10 = aten.view(%mul_4) {layer = "h.0.attn", phase = forward} : tensor<32x8x8xf32>
    %view_3 = aten.view(%permute_4) {layer = "h.0.attn", phase = forward} : tensor<32x8x4xf32>
    %bmm.1 = aten.bmm(%view.10, %view_3) {layer = "h.0.attn", phase = forward} : tensor<32x8x4xf32>
    %view.11 = aten.view(%bmm.1) {layer = "h.0.attn", phase = forward} : tensor<8x4x8x4xf32>
    %permute_6 = aten.permute(%view.11, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = forward} : tensor<8x8x4x4xf32>
    %view.12 = aten.view(%permute_6) {layer = "h.0.attn.proj", phase = forward} : tensor<64x16xf32>
    %permute_7 = aten.permute(%h.0.attn.proj.weight, dims = [1, 0]) {layer = "h.0.attn.proj", phase = forward} : tensor<16x16xf32>
    %addmm.3 = aten.addmm(%h.0.attn.proj.bias, %view.12, %permute_7) {layer = "h.0.attn.proj", phase = forward} : tensor<64x16xf32>
    %view.13 = aten.view(%addmm.3) {layer = "h.0.attn.proj", phase = forward} : tensor<8x8x16xf32>
    %arange_8 = aten.arange.start_step(start = 0, step = 32) {layer = "h.0.drop", phase = forward} : tensor<8xi64>
    %arange_9 = aten.arange.start_step(start = 0, step = 4) {layer = "h.0.drop", phase = forward} : tensor<8xi64>
    %arange_10 = aten.arange.start_step(start = 0) {layer = "h.0.drop", phase = forward} : tensor<16xi64>
    %random_2 = dist.random(%random_state, [%arange_8, %arange_9, %arange_10], draw = 2) {layer = "h.0.drop", phase = forward} : tensor<8x8x16xf32>
    %lt_2 = aten.lt.Scalar(%random_2, other = 0.9) {layer = "h.0.drop", phase = forward} : tensor<8x8x16xi1>
    %to_copy_2 = aten._to_copy(%lt_2) {layer = "h.0.drop", phase = forward} : tensor<8x8x16xf32>
    %mul_5 = aten.mul.Tensor(%view.13, %to_copy_2) {layer = "h.0.drop", phase = forward} : tensor<8x8x16xf32>
    %mul_6 = aten.mul.Scalar(%mul_5, other = 1.1111111111111112) {layer = "h.0.drop", phase = forward} : tensor<8x8x16xf32>
    %add.2 = aten.add.Tensor(%mul_1, %mul_6) {layer = "h.0", phase = forward} : tensor<8x8x16xf32>
    %native_layer_norm.1, %native_layer_norm.1_1, %native_layer_norm.1_2 = aten.native_layer_norm(%add.2, %h.0.ln_2.weight, %h.0.ln_2.bias, eps = 1.0e-05) {layer = "h.0.ln_2", phase = forward} : tensor<8x8x16xf32>, tensor<8x8x1xf32>, tensor<8x8x1xf32>
    %view.14 = aten.view(%native_layer_norm.1) {layer = "h.0.mlp.fc_in", phase = forward} : tensor<64x16xf32>
    %permute_8 = aten.permute(%h.0.mlp.fc_in.weight, dims = [1, 0]) {layer = "h.0.mlp.fc_in", phase = forward} : tensor<16x64xf32>
    %addmm.4 = aten.addmm(%h.0.mlp.fc_in.bias, %view.14, %permute_8) {layer = "h.0.mlp.fc_in", phase = forward} : tensor<64x64xf32>
    %view.15 = aten.view(%addmm.4) {layer = "h.0.mlp.fc_in", phase = forward} : tensor<8x8x64xf32>
    %gelu = aten.gelu(%view.15, approximate = "tanh") {layer = "h.0.mlp", phase = forward} : tensor<8x8x64xf32>
    %view.16 = aten.view(%gelu) {layer = "h.0.mlp.fc_out", phase = forward} : tensor<64x64xf32>
    %permute_9 = aten.permute(%h.0.mlp.fc_out.weight, dims = [1, 0]) {layer = "h.0.mlp.fc_out", phase = forward} : tensor<64x16xf32>
    %addmm.5 = aten.addmm(%h.0.mlp.fc_out.bias, %view.16, %permute_9) {layer = "h.0.mlp.fc_out", phase = forward} : tensor<64x16xf32>
    %view.17 = aten.view(%addmm.5) {layer = "h.0.mlp.fc_out", phase = forward} : tensor<8x8x16xf32>
    %arange_11 = aten.arange.start_step(start = 0, step = 32) {layer = "h.0.drop", phase = forward} : tensor<8xi64>
    %arange_12 = aten.arange.start_step(start = 0, step = 4) {layer = "h.0.drop", phase = forward} : tensor<8xi64>
    %arange_13 = aten.arange.start_step(start = 0) {layer = "h.0.drop", phase = forward} : tensor<16xi64>
    %random_3 = dist.random(%random_state, [%arange_11, %arange_12, %arange_13], draw = 3) {layer = "h.0.drop", phase = forward} : tensor<8x8x16xf32>
    %lt_3 = aten.lt.Scalar(%random_3, other = 0.9) {layer = "h.0.drop", phase = forward} : tensor<8x8x16xi1>
    %to_copy_3 = aten._to_copy(%lt_3) {layer = "h.0.drop", phase = forward} : tensor<8x8x16xf32>
    %mul_7 = aten.mul.Tensor(%view.17, %to_copy_3) {layer = "h.0.drop", phase = forward} : tensor<8x8x16xf32>
    %mul_8 = aten.mul.Scalar(%mul_7, other = 1.1111111111111112) {layer = "h.0.drop", phase = forward} : tensor<8x8x16xf32>
    %add.3 = aten.add.Tensor(%add.2, %mul_8) {layer = "h.0", phase = forward} : tensor<8x8x16xf32>
    %native_layer_norm.2, %native_layer_norm.2_1, %native_layer_norm.2_2 = aten.native_layer_norm(%add.3, %ln_f.weight, %ln_f.bias, eps = 1.0e-05) {layer = "ln_f", phase = forward} : tensor<8x8x16xf32>, tensor<8x8x1xf32>, tensor<8x8x1xf32>
    %permute_10 = aten.permute(%wte.weight, dims = [1, 0]) {layer = "head", phase = forward} : tensor<16x32xf32>
    %view.18 = aten.view(%native_layer_norm.2) {layer = "head", phase = forward} : tensor<64x16xf32>
    %mm = aten.mm(%view.18, %permute_10) {layer = "head", phase = forward} : tensor<64x32xf32>
    %amax = aten.amax(%mm, dim = [1], keepdim = true) {layer = "", phase = forward} : tensor<64x1xf32>
    %sub = aten.sub.Tensor(%mm, %amax) {layer = "", phase = forward} : tensor<64x32xf32>
    %exp = aten.exp(%sub) {layer = "", phase = forward} : tensor<64x32xf32>
    %sum = aten.sum.dim_IntList(%exp, dim = [1], keepdim = true) {layer = "", phase = forward} : tensor<64x1xf32>
    %_log_softmax = aten.log(%sum) {layer = "", phase = forward} : tensor<64x1xf32>
    %sub_1 = aten.sub.Tensor(%sub, %_log_softmax) {layer = "", phase = forward} : tensor<64x32xf32>
    %view_4 = aten.view(%labels) {layer = "", phase = forward} : tensor<64x1xi64>
    %ne = aten.ne.Scalar(%view_4, other = -100) {layer = "", phase = forward} : tensor<64x1xi1>
    %full_3 = aten.full(fill_value = 0) {layer = "", phase = forward} : tensor<i64>
    %where_1 = aten.where.self(%ne, %view_4, %full_3) {layer = "", phase = forward} : tensor<64x1xi64>
    %gather = aten.gather(%sub_1, %where_1, dim = 1) {layer = "", phase = forward} : tensor<64x1xf32>
    %view_5 = aten.view(%labels) {layer = "", phase = forward} : tensor<64x1xi64>
    %eq = aten.eq.Scalar(%view_5, other = -100) {layer = "", phase = forward} : tensor<64x1xi1>
    %neg = aten.neg(%gather) {layer = "", phase = forward} : tensor<64x1xf32>
    %masked_fill = aten.masked_fill.Scalar(%neg, %eq, value = 0.0) {layer = "", phase = forward} : tensor<64x1xf32>
    %to_copy_4 = aten._to_copy(%ne) {layer = "", phase = forward} : tensor<64x1xf32>
    %sum_1 = aten.sum.dim_IntList(%to_copy_4, dim = [0, 1]) {layer = "", phase = forward} : tensor<f32>
    %sum_2 = aten.sum.dim_IntList(%masked_fill, dim = [0, 1]) {layer = "", phase = forward} : tensor<f32>
    %div = aten.div.Tensor(%sum_2, %sum_1) {layer = "", phase = forward} : tensor<f32>
    %view_6 = aten.view(%labels) {layer = "", phase = forward} : tensor<64x1xi64>
    %ne_1 = aten.ne.Scalar(%view_6, other = -100) {layer = "", phase = forward} : tensor<64x1xi1>
    %full_4 = aten.full(fill_value = 0) {layer = "", phase = forward} : tensor<i64>
    %where_2 = aten.where.self(%ne_1, %view_6, %full_4) {layer = "", phase = forward} : tensor<64x1xi64>
    %div_1 = aten.div.Tensor(%tangent, %sum_1) {layer = "", phase = backward} : tensor<f32>
    %full_5 = aten.full(fill_value = 0.0) {layer = "", phase = forward} : tensor<f32>
    %neg_1 = aten.neg(%div_1) {layer = "", phase = backward} : tensor<f32>
    %where_3 = aten.where.self(%ne_1, %neg_1, %full_5) {layer = "", phase = backward} : tensor<64x1xf32>
    %exp_1 = aten.exp(%sub_1) {layer = "", phase = forward} : tensor<64x32xf32>
    %neg_2 = aten.neg(%where_3) {layer = "", phase = backward} : tensor<64x1xf32>
    %mul_9 = aten.mul.Tensor(%exp_1, %neg_2) {layer = "", phase = backward} : tensor<64x32xf32>
    %scatter_add = aten.scatter_add(%mul_9, %where_2, %where_3, dim = 1) {layer = "", phase = backward} : tensor<64x32xf32>
    %permute_11 = aten.permute(%scatter_add, dims = [1, 0]) {layer = "head", phase = backward} : tensor<32x64xf32>
    %mm.1 = aten.mm(%permute_11, %view.18) {layer = "head", phase = backward} : tensor<32x16xf32>
    %mm.2 = aten.mm(%scatter_add, %wte.weight) {layer = "head", phase = backward} : tensor<64x16xf32>
    %view.23 = aten.view(%mm.2) {layer = "head", phase = backward} : tensor<8x8x16xf32>
    %native_layer_norm_backward, %native_layer_norm_backward_1, %native_layer_norm_backward_2 = aten.native_layer_norm_backward(%view.23, %add.3, %native_layer_norm.2_1, %native_layer_norm.2_2, %ln_f.weight, %ln_f.bias, output_mask = [true, true, true]) {layer = "ln_f", phase = backward} : tensor<8x8x16xf32>, tensor<16xf32>, tensor<16xf32>
    %native_dropout_backward = aten.native_dropout_backward(%native_layer_norm_backward, %lt_3, scale = 1.1111111111111112) {layer = "h.0.drop", phase = backward} : tensor<8x8x16xf32>
    %view.24 = aten.view(%native_dropout_backward) {layer = "h.0.mlp.fc_out", phase = backward} : tensor<64x16xf32>
    %mm.3 = aten.mm(%view.24, %h.0.mlp.fc_out.weight) {layer = "h.0.mlp.fc_out", phase = backward} : tensor<64x64xf32>
    %permute_12 = aten.permute(%view.24, dims = [1, 0]) {layer = "h.0.mlp.fc_out", phase = backward} : tensor<16x64xf32>
    %mm.4 = aten.mm(%permute_12, %view.16) {layer = "h.0.mlp.fc_out", phase = backward} : tensor<16x64xf32>
    %sum.1 = aten.sum.dim_IntList(%view.24, dim = [0], keepdim = true) {layer = "h.0.mlp.fc_out", phase = backward} : tensor<1x16xf32>
    %view.25 = aten.view(%sum.1) {layer = "h.0.mlp.fc_out", phase = backward} : tensor<16xf32>
    %view.26 = aten.view(%mm.3) {layer = "h.0.mlp.fc_out", phase = backward} : tensor<8x8x64xf32>
    %gelu_backward = aten.gelu_backward(%view.26, %view.15, approximate = "tanh") {layer = "h.0.mlp", phase = backward} : tensor<8x8x64xf32>
    %view.27 = aten.view(%gelu_backward) {layer = "h.0.mlp.fc_in", phase = backward} : tensor<64x64xf32>
    %mm.5 = aten.mm(%view.27, %h.0.mlp.fc_in.weight) {layer = "h.0.mlp.fc_in", phase = backward} : tensor<64x16xf32>
    %permute_13 = aten.permute(%view.27, dims = [1, 0]) {layer = "h.0.mlp.fc_in", phase = backward} : tensor<64x64xf32>
    %mm.6 = aten.mm(%permute_13, %view.14) {layer = "h.0.mlp.fc_in", phase = backward} : tensor<64x16xf32>
    %sum.2 = aten.sum.dim_IntList(%view.27, dim = [0], keepdim = true) {layer = "h.0.mlp.fc_in", phase = backward} : tensor<1x64xf32>
    %view.28 = aten.view(%sum.2) {layer = "h.0.mlp.fc_in", phase = backward} : tensor<64xf32>
    %view.29 = aten.view(%mm.5) {layer = "h.0.mlp.fc_in", phase = backward} : tensor<8x8x16xf32>
    %native_layer_norm_backward.1, %native_layer_norm_backward.1_1, %native_layer_norm_backward.1_2 = aten.native_layer_norm_backward(%view.29, %add.2, %native_layer_norm.1_1, %native_layer_norm.1_2, %h.0.ln_2.weight, %h.0.ln_2.bias, output_mask = [true, true, true]) {layer = "h.0.ln_2", phase = backward} : tensor<8x8x16xf32>, tensor<16xf32>, tensor<16xf32>
    %add.4 = aten.add.Tensor(%native_layer_norm_backward, %native_layer_norm_backward.1) {layer = "", phase = backward} : tensor<8x8x16xf32>
    %native_dropout_backward.1 = aten.native_dropout_backward(%add.4, %lt_2, scale = 1.1111111111111112) {layer = "h.0.drop", phase = backward} : tensor<8x8x16xf32>
    %view.30 = aten.view(%native_dropout_backward.1) {layer = "h.0.attn.proj", phase = backward} : tensor<64x16xf32>
    %mm.7 = aten.mm(%view.30, %h.0.attn.proj.weight) {layer = "h.0.attn.proj", phase = backward} : tensor<64x16xf32>
    %permute_14 = aten.permute(%view.30, dims = [1, 0]) {layer = "h.0.attn.proj", phase = backward} : tensor<16x64xf32>
    %mm.8 = aten.mm(%permute_14, %view.12) {layer = "h.0.attn.proj", phase = backward} : tensor<16x16xf32>
    %sum.3 = aten.sum.dim_IntList(%view.30, dim = [0], keepdim = true) {layer = "h.0.attn.proj", phase = backward} : tensor<1x16xf32>
    %view.31 = aten.view(%sum.3) {layer = "h.0.attn.proj", phase = backward} : tensor<16xf32>
    %view.33 = aten.view(%mm.7) {layer = "h.0.attn", phase = backward} : tensor<8x8x4x4xf32>
    %permute_15 = aten.permute(%view.33, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = backward} : tensor<8x4x8x4xf32>
    %view_7 = aten.view(%permute_15) {layer = "h.0.attn", phase = backward} : tensor<32x8x4xf32>
    %permute_16 = aten.permute(%view.10, dims = [0, 2, 1]) {layer = "h.0.attn", phase = forward} : tensor<32x8x8xf32>
    %bmm.2 = aten.bmm(%permute_16, %view_7) {layer = "h.0.attn", phase = backward} : tensor<32x8x4xf32>
    %permute_17 = aten.permute(%view_3, dims = [0, 2, 1]) {layer = "h.0.attn", phase = forward} : tensor<32x4x8xf32>
    %bmm.3 = aten.bmm(%view_7, %permute_17) {layer = "h.0.attn", phase = backward} : tensor<32x8x8xf32>
    %view.34 = aten.view(%bmm.2) {layer = "h.0.attn", phase = backward} : tensor<8x4x8x4xf32>
    %view.35 = aten.view(%bmm.3) {layer = "h.0.attn", phase = backward} : tensor<8x4x8x8xf32>
    %native_dropout_backward.2 = aten.native_dropout_backward(%view.35, %lt_1, scale = 1.1111111111111112) {layer = "h.0.attn", phase = backward} : tensor<8x4x8x8xf32>
    %_softmax_backward_data = aten._softmax_backward_data(%native_dropout_backward.2, %_safe_softmax, dim = -1, input_dtype = f32) {layer = "h.0.attn", phase = backward} : tensor<8x4x8x8xf32>
    %view.36 = aten.view(%_softmax_backward_data) {layer = "h.0.attn", phase = backward} : tensor<32x8x8xf32>
    %permute_18 = aten.permute(%view_1, dims = [0, 2, 1]) {layer = "h.0.attn", phase = forward} : tensor<32x4x8xf32>
    %bmm.4 = aten.bmm(%permute_18, %view.36) {layer = "h.0.attn", phase = backward} : tensor<32x4x8xf32>
    %permute_19 = aten.permute(%view_2, dims = [0, 2, 1]) {layer = "h.0.attn", phase = forward} : tensor<32x8x4xf32>
    %bmm.5 = aten.bmm(%view.36, %permute_19) {layer = "h.0.attn", phase = backward} : tensor<32x8x4xf32>
    %view.37 = aten.view(%bmm.4) {layer = "h.0.attn", phase = backward} : tensor<8x4x4x8xf32>
    %view.38 = aten.view(%bmm.5) {layer = "h.0.attn", phase = backward} : tensor<8x4x8x4xf32>
    %mul.2 = aten.mul.Scalar(%view.37, other = 0.7071067811865476) {layer = "h.0.attn", phase = backward} : tensor<8x4x4x8xf32>
    %mul.3 = aten.mul.Scalar(%view.38, other = 0.7071067811865476) {layer = "h.0.attn", phase = backward} : tensor<8x4x8x4xf32>
    %permute_20 = aten.permute(%view.34, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = backward} : tensor<8x8x4x4xf32>
    %view.39 = aten.view(%permute_20) {layer = "h.0.attn.v", phase = backward} : tensor<64x16xf32>
    %mm.9 = aten.mm(%view.39, %h.0.attn.v.weight) {layer = "h.0.attn.v", phase = backward} : tensor<64x16xf32>
    %permute_21 = aten.permute(%view.39, dims = [1, 0]) {layer = "h.0.attn.v", phase = backward} : tensor<16x64xf32>
    %mm.10 = aten.mm(%permute_21, %view.6) {layer = "h.0.attn.v", phase = backward} : tensor<16x16xf32>
    %sum.4 = aten.sum.dim_IntList(%view.39, dim = [0], keepdim = true) {layer = "h.0.attn.v", phase = backward} : tensor<1x16xf32>
    %view.40 = aten.view(%sum.4) {layer = "h.0.attn.v", phase = backward} : tensor<16xf32>
    %view.41 = aten.view(%mm.9) {layer = "h.0.attn.v", phase = backward} : tensor<8x8x16xf32>
    %permute_22 = aten.permute(%mul.2, dims = [0, 3, 1, 2]) {layer = "h.0.attn", phase = backward} : tensor<8x8x4x4xf32>
    %view_8 = aten.view(%permute_22) {layer = "h.0.attn.k", phase = backward} : tensor<64x16xf32>
    %mm.11 = aten.mm(%view_8, %h.0.attn.k.weight) {layer = "h.0.attn.k", phase = backward} : tensor<64x16xf32>
    %permute_23 = aten.permute(%view_8, dims = [1, 0]) {layer = "h.0.attn.k", phase = backward} : tensor<16x64xf32>
    %mm.12 = aten.mm(%permute_23, %view.3) {layer = "h.0.attn.k", phase = backward} : tensor<16x16xf32>
    %sum.5 = aten.sum.dim_IntList(%view_8, dim = [0], keepdim = true) {layer = "h.0.attn.k", phase = backward} : tensor<1x16xf32>
    %view.43 = aten.view(%sum.5) {layer = "h.0.attn.k", phase = backward} : tensor<16xf32>
    %view.44 = aten.view(%mm.11) {layer = "h.0.attn.k", phase = backward} : tensor<8x8x16xf32>
    %add.5 = aten.add.Tensor(%view.41, %view.44) {layer = "h.0.attn", phase = backward} : tensor<8x8x16xf32>
    %permute_24 = aten.permute(%mul.3, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = backward} : tensor<8x8x4x4xf32>
    %view.45 = aten.view(%permute_24) {layer = "h.0.attn.q", phase = backward} : tensor<64x16xf32>
    %mm.13 = aten.mm(%view.45, %h.0.attn.q.weight) {layer = "h.0.attn.q", phase = backward} : tensor<64x16xf32>
    %permute_25 = aten.permute(%view.45, dims = [1, 0]) {layer = "h.0.attn.q", phase = backward} : tensor<16x64xf32>
    %mm.14 = aten.mm(%permute_25, %view) {layer = "h.0.attn.q", phase = backward} : tensor<16x16xf32>
    %sum.6 = aten.sum.dim_IntList(%view.45, dim = [0], keepdim = true) {layer = "h.0.attn.q", phase = backward} : tensor<1x16xf32>
    %view.46 = aten.view(%sum.6) {layer = "h.0.attn.q", phase = backward} : tensor<16xf32>
    %view.47 = aten.view(%mm.13) {layer = "h.0.attn.q", phase = backward} : tensor<8x8x16xf32>
    %add.6 = aten.add.Tensor(%add.5, %view.47) {layer = "h.0.attn", phase = backward} : tensor<8x8x16xf32>
    %native_layer_norm_backward.2, %native_layer_norm_backward.2_1, %native_layer_norm_backward.2_2 = aten.native_layer_norm_backward(%add.6, %mul_1, %native_layer_norm_1, %native_layer_norm_2, %h.0.ln_1.weight, %h.0.ln_1.bias, output_mask = [true, true, true]) {layer = "h.0.ln_1", phase = backward} : tensor<8x8x16xf32>, tensor<16xf32>, tensor<16xf32>
    %add.7 = aten.add.Tensor(%add.4, %native_layer_norm_backward.2) {layer = "", phase = backward} : tensor<8x8x16xf32>
    %native_dropout_backward.3 = aten.native_dropout_backward(%add.7, %lt, scale = 1.1111111111111112) {layer = "drop", phase = backward} : tensor<8x8x16xf32>
    %sum.7 = aten.sum.dim_IntList(%native_dropout_backward.3, dim = [0], keepdim = true) {layer = "", phase = backward} : tensor<1x8x16xf32>
    %view.48 = aten.view(%sum.7) {layer = "", phase = backward} : tensor<8x16xf32>
    %embedding_dense_backward = aten.embedding_dense_backward(%view.48, %arange, padding_idx = -1, scale_grad_by_freq = false) {layer = "wpe", phase = backward} : tensor<8x16xf32>
    %embedding_dense_backward.1 = aten.embedding_dense_backward(%native_dropout_backward.3, %input_ids, padding_idx = -1, scale_grad_by_freq = false) {layer = "wte", phase = backward} : tensor<32x16xf32>
    %add.8 = aten.add.Tensor(%mm.1, %embedding_dense_backward.1) {layer = "", phase = backward} : tensor<32x16xf32>
    %arange_14 = aten.arange.start_step(start = 0, step = 4) {layer = "", phase = forward} : tensor<2xi64>
    %add_1 = aten.add.Tensor(%random_state, %arange_14) {layer = "", phase = forward} : tensor<2xi64>
    func.return %div, %add.8, %embedding_dense_backward, %native_layer_norm_backward.2_1, %native_layer_norm_backward.2_2, %mm.14, %view.46, %mm.12, %view.43, %mm.10, %view.40, %mm.8, %view.31, %native_layer_norm_backward.1_1, %native_layer_norm_backward.1_2, %mm.6, %view.28, %mm.4, %view.25, %native_layer_norm_backward_1, %native_layer_norm_backward_2, %add_1 : tensor<f32>, tensor<32x16xf32>, tensor<8x16xf32>, tensor<16xf32>, tensor<16xf32>, tensor<16x16xf32>, tensor<16xf32>, tensor<16x16xf32>, tensor<16xf32>, tensor<16x16xf32>, tensor<16xf32>, tensor<16x16xf32>, tensor<16xf32>, tensor<16xf32>, tensor<16xf32>, tensor<64x16xf32>, tensor<64xf32>, tensor<16x64xf32>, tensor<16xf32>, tensor<16xf32>, tensor<16xf32>, tensor<2xi64>
  }
}
