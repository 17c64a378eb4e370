builtin.module {
  func.func @step(%wte.weight: tensor<32x16xf32> {dist.kind = "param", dist.name = "wte.weight", dist.aliases = ["head.weight"]}, %wpe.weight: tensor<8x16xf32> {dist.kind = "param", dist.name = "wpe.weight"}, %h.0.ln_1.weight: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.ln_1.weight"}, %h.0.ln_1.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.ln_1.bias"}, %h.0.attn.q.weight: tensor<16x16xf32> {dist.kind = "param", dist.name = "h.0.attn.q.weight"}, %h.0.attn.q.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.attn.q.bias"}, %h.0.attn.k.weight: tensor<16x16xf32> {dist.kind = "param", dist.name = "h.0.attn.k.weight"}, %h.0.attn.k.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.attn.k.bias"}, %h.0.attn.v.weight: tensor<16x16xf32> {dist.kind = "param", dist.name = "h.0.attn.v.weight"}, %h.0.attn.v.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.attn.v.bias"}, %h.0.attn.proj.weight: tensor<16x16xf32> {dist.kind = "param", dist.name = "h.0.attn.proj.weight"}, %h.0.attn.proj.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.attn.proj.bias"}, %h.0.ln_2.weight: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.ln_2.weight"}, %h.0.ln_2.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.ln_2.bias"}, %h.0.mlp.fc_in.weight: tensor<64x16xf32> {dist.kind = "param", dist.name = "h.0.mlp.fc_in.weight"}, %h.0.mlp.fc_in.bias: tensor<64xf32> {dist.kind = "param", dist.name = "h.0.mlp.fc_in.bias"}, %h.0.mlp.fc_out.weight: tensor<16x64xf32> {dist.kind = "param", dist.name = "h.0.mlp.fc_out.weight"}, %h.0.mlp.fc_out.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.0.mlp.fc_out.bias"}, %h.1.ln_1.weight: tensor<16xf32> {dist.kind = "param", dist.name = "h.1.ln_1.weight"}, %h.1.ln_1.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.1.ln_1.bias"}, %h.1.attn.q.weight: tensor<16x16xf32> {dist.kind = "param", dist.name = "h.1.attn.q.weight"}, %h.1.attn.q.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.1.attn.q.bias"}, %h.1.attn.k.weight: tensor<16x16xf32> {dist.kind = "param", dist.name = "h.1.attn.k.weight"}, %h.1.attn.k.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.1.attn.k.bias"}, %h.1.attn.v.weight: tensor<16x16xf32> {dist.kind = "param", dist.name = "h.1.attn.v.weight"}, %h.1.attn.v.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.1.attn.v.bias"}, %h.1.attn.proj.weight: tensor<16x16xf32> {dist.kind = "param", dist.name = "h.1.attn.proj.weight"}, %h.1.attn.proj.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.1.attn.proj.bias"}, %h.1.ln_2.weight: tensor<16xf32> {dist.kind = "param", dist.name = "h.1.ln_2.weight"}, %h.1.ln_2.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.1.ln_2.bias"}, %h.1.mlp.fc_in.weight: tensor<64x16xf32> {dist.kind = "param", dist.name = "h.1.mlp.fc_in.weight"}, %h.1.mlp.fc_in.bias: tensor<64xf32> {dist.kind = "param", dist.name = "h.1.mlp.fc_in.bias"}, %h.1.mlp.fc_out.weight: tensor<16x64xf32> {dist.kind = "param", dist.name = "h.1.mlp.fc_out.weight"}, %h.1.mlp.fc_out.bias: tensor<16xf32> {dist.kind = "param", dist.name = "h.1.mlp.fc_out.bias"}, %ln_f.weight: tensor<16xf32> {dist.kind = "param", dist.name = "ln_f.weight"}, %ln_f.bias: tensor<16xf32> {dist.kind = "param", dist.name = "ln_f.bias"}, %input_ids: tensor<8x8xi64> {dist.kind = "input", dist.name = "input_ids"}, %labels: tensor<8x8xi64> {dist.kind = "input", dist.name = "labels"}, %tangent: tensor<f32> {dist.kind = "tangent", dist.name = "loss"}) -> (tensor<f32> {dist.kind = "output", dist.name = "0"}, tensor<32x16xf32> {dist.kind = "grad", dist.name = "wte.weight"}, tensor<8x16xf32> {dist.kind = "grad", dist.name = "wpe.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.ln_1.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.ln_1.bias"}, tensor<16x16xf32> {dist.kind = "grad", dist.name = "h.0.attn.q.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.attn.q.bias"}, tensor<16x16xf32> {dist.kind = "grad", dist.name = "h.0.attn.k.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.attn.k.bias"}, tensor<16x16xf32> {dist.kind = "grad", dist.name = "h.0.attn.v.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.attn.v.bias"}, tensor<16x16xf32> {dist.kind = "grad", dist.name = "h.0.attn.proj.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.attn.proj.bias"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.ln_2.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.ln_2.bias"}, tensor<64x16xf32> {dist.kind = "grad", dist.name = "h.0.mlp.fc_in.weight"}, tensor<64xf32> {dist.kind = "grad", dist.name = "h.0.mlp.fc_in.bias"}, tensor<16x64xf32> {dist.kind = "grad", dist.name = "h.0.mlp.fc_out.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.0.mlp.fc_out.bias"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.1.ln_1.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.1.ln_1.bias"}, tensor<16x16xf32> {dist.kind = "grad", dist.name = "h.1.attn.q.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.1.attn.q.bias"}, tensor<16x16xf32> {dist.kind = "grad", dist.name = "h.1.attn.k.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.1.attn.k.bias"}, tensor<16x16xf32> {dist.kind = "grad", dist.name = "h.1.attn.v.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.1.attn.v.bias"}, tensor<16x16xf32> {dist.kind = "grad", dist.name = "h.1.attn.proj.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.1.attn.proj.bias"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.1.ln_2.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.1.ln_2.bias"}, tensor<64x16xf32> {dist.kind = "grad", dist.name = "h.1.mlp.fc_in.weight"}, tensor<64xf32> {dist.kind = "grad", dist.name = "h.1.mlp.fc_in.bias"}, tensor<16x64xf32> {dist.kind = "grad", dist.name = "h.1.mlp.fc_out.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "h.1.mlp.fc_out.bias"}, tensor<16xf32> {dist.kind = "grad", dist.name = "ln_f.weight"}, tensor<16xf32> {dist.kind = "grad", dist.name = "ln_f.bias"}) {
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
    %view.12 = aten.view(%native_layer_norm.1) {layer = "h.0.mlp.fc_in", phase = forward} : tensor<64x16xf32>
    %permute_8 = aten.permute(%h.0.mlp.fc_in.weight, dims = [1, 0]) {layer = "h.0.mlp.fc_in", phase = forward} : tensor<16x64xf32>
    %addmm.4 = aten.addmm(%h.0.mlp.fc_in.bias, %view.12, %permute_8) {layer = "h.0.mlp.fc_in", phase = forward} : tensor<64x64xf32>
    %view.13 = aten.view(%addmm.4) {layer = "h.0.mlp.fc_in", phase = forward} : tensor<8x8x64xf32>
    %gelu = aten.gelu(%view.13, approximate = "tanh") {layer = "h.0.mlp", phase = forward} : tensor<8x8x64xf32>
    %view.14 = aten.view(%gelu) {layer = "h.0.mlp.fc_out", phase = forward} : tensor<64x64xf32>
    %permute_9 = aten.permute(%h.0.mlp.fc_out.weight, dims = [1, 0]) {layer = "h.0.mlp.fc_out", phase = forward} : tensor<64x16xf32>
    %addmm.5 = aten.addmm(%h.0.mlp.fc_out.bias, %view.14, %permute_9) {layer = "h.0.mlp.fc_out", phase = forward} : tensor<64x16xf32>
    %view.15 = aten.view(%addmm.5) {layer = "h.0.mlp.fc_out", phase = forward} : tensor<8x8x16xf32>
    %add.2 = aten.add.Tensor(%add.1, %view.15) {layer = "h.0", phase = forward} : tensor<8x8x16xf32>
    %native_layer_norm.2, %native_layer_norm.2_1, %native_layer_norm.2_2 = aten.native_layer_norm(%add.2, %h.1.ln_1.weight, %h.1.ln_1.bias, eps = 1.0e-05) {layer = "h.1.ln_1", phase = forward} : tensor<8x8x16xf32>, tensor<8x8x1xf32>, tensor<8x8x1xf32>
    %view.16 = aten.view(%native_layer_norm.2) {layer = "h.1.attn.q", phase = forward} : tensor<64x16xf32>
    %permute_10 = aten.permute(%h.1.attn.q.weight, dims = [1, 0]) {layer = "h.1.attn.q", phase = forward} : tensor<16x16xf32>
    %addmm.6 = aten.addmm(%h.1.attn.q.bias, %view.16, %permute_10) {layer = "h.1.attn.q", phase = forward} : tensor<64x16xf32>
    %view.18 = aten.view(%addmm.6) {layer = "h.1.attn", phase = forward} : tensor<8x8x4x4xf32>
    %permute_11 = aten.permute(%view.18, dims = [0, 2, 1, 3]) {layer = "h.1.attn", phase = forward} : tensor<8x4x8x4xf32>
    %view.19 = aten.view(%native_layer_norm.2) {layer = "h.1.attn.k", phase = forward} : tensor<64x16xf32>
    %permute_12 = aten.permute(%h.1.attn.k.weight, dims = [1, 0]) {layer = "h.1.attn.k", phase = forward} : tensor<16x16xf32>
    %addmm.7 = aten.addmm(%h.1.attn.k.bias, %view.19, %permute_12) {layer = "h.1.attn.k", phase = forward} : tensor<64x16xf32>
    %view.21 = aten.view(%addmm.7) {layer = "h.1.attn", phase = forward} : tensor<8x8x4x4xf32>
    %permute_13 = aten.permute(%view.21, dims = [0, 2, 1, 3]) {layer = "h.1.attn", phase = forward} : tensor<8x4x8x4xf32>
    %view.22 = aten.view(%native_layer_norm.2) {layer = "h.1.attn.v", phase = forward} : tensor<64x16xf32>
    %permute_14 = aten.permute(%h.1.attn.v.weight, dims = [1, 0]) {layer = "h.1.attn.v", phase = forward} : tensor<16x16xf32>
    %addmm.8 = aten.addmm(%h.1.attn.v.bias, %view.22, %permute_14) {layer = "h.1.attn.v", phase = forward} : tensor<64x16xf32>
    %view.24 = aten.view(%addmm.8) {layer = "h.1.attn", phase = forward} : tensor<8x8x4x4xf32>
    %permute_15 = aten.permute(%view.24, dims = [0, 2, 1, 3]) {layer = "h.1.attn", phase = forward} : tensor<8x4x8x4xf32>
    %_scaled_dot_product_flash_attention_for_cpu.1, %_scaled_dot_product_flash_attention_for_cpu.1_1 = aten._scaled_dot_product_flash_attention_for_cpu(%permute_11, %permute_13, %permute_15, is_causal = true) {layer = "h.1.attn", phase = forward} : tensor<8x4x8x4xf32>, tensor<8x4x8xf32>
    %permute_16 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu.1, dims = [0, 2, 1, 3]) {layer = "h.1.attn", phase = forward} : tensor<8x8x4x4xf32>
    %view.26 = aten.view(%permute_16) {layer = "h.1.attn.proj", phase = forward} : tensor<64x16xf32>
    %permute_17 = aten.permute(%h.1.attn.proj.weight, dims = [1, 0]) {layer = "h.1.attn.proj", phase = forward} : tensor<16x16xf32>
    %addmm.9 = aten.addmm(%h.1.attn.proj.bias, %view.26, %permute_17) {layer = "h.1.attn.proj", phase = forward} : tensor<64x16xf32>
    %view.27 = aten.view(%addmm.9) {layer = "h.1.attn.proj", phase = forward} : tensor<8x8x16xf32>
    %add.3 = aten.add.Tensor(%add.2, %view.27) {layer = "h.1", phase = forward} : tensor<8x8x16xf32>
    %native_layer_norm.3, %native_layer_norm.3_1, %native_layer_norm.3_2 = aten.native_layer_norm(%add.3, %h.1.ln_2.weight, %h.1.ln_2.bias, eps = 1.0e-05) {layer = "h.1.ln_2", phase = forward} : tensor<8x8x16xf32>, tensor<8x8x1xf32>, tensor<8x8x1xf32>
    %view.28 = aten.view(%native_layer_norm.3) {layer = "h.1.mlp.fc_in", phase = forward} : tensor<64x16xf32>
    %permute_18 = aten.permute(%h.1.mlp.fc_in.weight, dims = [1, 0]) {layer = "h.1.mlp.fc_in", phase = forward} : tensor<16x64xf32>
    %addmm.10 = aten.addmm(%h.1.mlp.fc_in.bias, %view.28, %permute_18) {layer = "h.1.mlp.fc_in", phase = forward} : tensor<64x64xf32>
    %view.29 = aten.view(%addmm.10) {layer = "h.1.mlp.fc_in", phase = forward} : tensor<8x8x64xf32>
    %gelu.1 = aten.gelu(%view.29, approximate = "tanh") {layer = "h.1.mlp", phase = forward} : tensor<8x8x64xf32>
    %view.30 = aten.view(%gelu.1) {layer = "h.1.mlp.fc_out", phase = forward} : tensor<64x64xf32>
    %permute_19 = aten.permute(%h.1.mlp.fc_out.weight, dims = [1, 0]) {layer = "h.1.mlp.fc_out", phase = forward} : tensor<64x16xf32>
    %addmm.11 = aten.addmm(%h.1.mlp.fc_out.bias, %view.30, %permute_19) {layer = "h.1.mlp.fc_out", phase = forward} : tensor<64x16xf32>
    %view.31 = aten.view(%addmm.11) {layer = "h.1.mlp.fc_out", phase = forward} : tensor<8x8x16xf32>
    %add.4 = aten.add.Tensor(%add.3, %view.31) {layer = "h.1", phase = forward} : tensor<8x8x16xf32>
    %native_layer_norm.4, %native_layer_norm.4_1, %native_layer_norm.4_2 = aten.native_layer_norm(%add.4, %ln_f.weight, %ln_f.bias, eps = 1.0e-05) {layer = "ln_f", phase = forward} : tensor<8x8x16xf32>, tensor<8x8x1xf32>, tensor<8x8x1xf32>
    %permute_20 = aten.permute(%wte.weight, dims = [1, 0]) {layer = "head", phase = forward} : tensor<16x32xf32>
    %view.32 = aten.view(%native_layer_norm.4) {layer = "head", phase = forward} : tensor<64x16xf32>
    %mm = aten.mm(%view.32, %permute_20) {layer = "head", phase = forward} : tensor<64x32xf32>
    %amax = aten.amax(%mm, dim = [1], keepdim = true) {layer = "", phase = forward} : tensor<64x1xf32>
    %sub = aten.sub.Tensor(%mm, %amax) {layer = "", phase = forward} : tensor<64x32xf32>
    %exp = aten.exp(%sub) {layer = "", phase = forward} : tensor<64x32xf32>
    %sum = aten.sum.dim_IntList(%exp, dim = [1], keepdim = true) {layer = "", phase = forward} : tensor<64x1xf32>
    %_log_softmax = aten.log(%sum) {layer = "", phase = forward} : tensor<64x1xf32>
    %sub_1 = aten.sub.Tensor(%sub, %_log_softmax) {layer = "", phase = forward} : tensor<64x32xf32>
    %view_1 = aten.view(%labels) {layer = "", phase = forward} : tensor<64x1xi64>
    %ne = aten.ne.Scalar(%view_1, other = -100) {layer = "", phase = forward} : tensor<64x1xi1>
    %full = aten.full(fill_value = 0) {layer = "", phase = forward} : tensor<i64>
    %where = aten.where.self(%ne, %view_1, %full) {layer = "", phase = forward} : tensor<64x1xi64>
    %gather = aten.gather(%sub_1, %where, dim = 1) {layer = "", phase = forward} : tensor<64x1xf32>
    %view_2 = aten.view(%labels) {layer = "", phase = forward} : tensor<64x1xi64>
    %eq = aten.eq.Scalar(%view_2, other = -100) {layer = "", phase = forward} : tensor<64x1xi1>
    %neg = aten.neg(%gather) {layer = "", phase = forward} : tensor<64x1xf32>
    %masked_fill = aten.masked_fill.Scalar(%neg, %eq, value = 0.0) {layer = "", phase = forward} : tensor<64x1xf32>
    %to_copy = aten._to_copy(%ne) {layer = "", phase = forward} : tensor<64x1xf32>
    %sum_1 = aten.sum.dim_IntList(%to_copy, dim = [0, 1]) {layer = "", phase = forward} : tensor<f32>
    %sum_2 = aten.sum.dim_IntList(%masked_fill, dim = [0, 1]) {layer = "", phase = forward} : tensor<f32>
    %div = aten.div.Tensor(%sum_2, %sum_1) {layer = "", phase = forward} : tensor<f32>
    %view_3 = aten.view(%labels) {layer = "", phase = forward} : tensor<64x1xi64>
    %ne_1 = aten.ne.Scalar(%view_3, other = -100) {layer = "", phase = forward} : tensor<64x1xi1>
    %full_1 = aten.full(fill_value = 0) {layer = "", phase = forward} : tensor<i64>
    %where_1 = aten.where.self(%ne_1, %view_3, %full_1) {layer = "", phase = forward} : tensor<64x1xi64>
    %div_1 = aten.div.Tensor(%tangent, %sum_1) {layer = "", phase = backward} : tensor<f32>
    %full_2 = aten.full(fill_value = 0.0) {layer = "", phase = forward} : tensor<f32>
    %neg_1 = aten.neg(%div_1) {layer = "", phase = backward} : tensor<f32>
    %where_2 = aten.where.self(%ne_1, %neg_1, %full_2) {layer = "", phase = backward} : tensor<64x1xf32>
    %exp_1 = aten.exp(%sub_1) {layer = "", phase = forward} : tensor<64x32xf32>
    %neg_2 = aten.neg(%where_2) {layer = "", phase = backward} : tensor<64x1xf32>
    %mul = aten.mul.Tensor(%exp_1, %neg_2) {layer = "", phase = backward} : tensor<64x32xf32>
    %scatter_add = aten.scatter_add(%mul, %where_1, %where_2, dim = 1) {layer = "", phase = backward} : tensor<64x32xf32>
    %permute_21 = aten.permute(%scatter_add, dims = [1, 0]) {layer = "head", phase = backward} : tensor<32x64xf32>
    %mm.1 = aten.mm(%permute_21, %view.32) {layer = "head", phase = backward} : tensor<32x16xf32>
    %mm.2 = aten.mm(%scatter_add, %wte.weight) {layer = "head", phase = backward} : tensor<64x16xf32>
    %view.37 = aten.view(%mm.2) {layer = "head", phase = backward} : tensor<8x8x16xf32>
    %native_layer_norm_backward, %native_layer_norm_backward_1, %native_layer_norm_backward_2 = aten.native_layer_norm_backward(%view.37, %add.4, %native_layer_norm.4_1, %native_layer_norm.4_2, %ln_f.weight, %ln_f.bias, output_mask = [true, true, true]) {layer = "ln_f", phase = backward} : tensor<8x8x16xf32>, tensor<16xf32>, tensor<16xf32>
    %view.38 = aten.view(%native_layer_norm_backward) {layer = "h.1.mlp.fc_out", phase = backward} : tensor<64x16xf32>
    %mm.3 = aten.mm(%view.38, %h.1.mlp.fc_out.weight) {layer = "h.1.mlp.fc_out", phase = backward} : tensor<64x64xf32>
    %permute_22 = aten.permute(%view.38, dims = [1, 0]) {layer = "h.1.mlp.fc_out", phase = backward} : tensor<16x64xf32>
    %mm.4 = aten.mm(%permute_22, %view.30) {layer = "h.1.mlp.fc_out", phase = backward} : tensor<16x64xf32>
    %sum.1 = aten.sum.dim_IntList(%view.38, dim = [0], keepdim = true) {layer = "h.1.mlp.fc_out", phase = backward} : tensor<1x16xf32>
    %view.39 = aten.view(%sum.1) {layer = "h.1.mlp.fc_out", phase = backward} : tensor<16xf32>
    %view.40 = aten.view(%mm.3) {layer = "h.1.mlp.fc_out", phase = backward} : tensor<8x8x64xf32>
    %gelu_backward = aten.gelu_backward(%view.40, %view.29, approximate = "tanh") {layer = "h.1.mlp", phase = backward} : tensor<8x8x64xf32>
    %view.41 = aten.view(%gelu_backward) {layer = "h.1.mlp.fc_in", phase = backward} : tensor<64x64xf32>
    %mm.5 = aten.mm(%view.41, %h.1.mlp.fc_in.weight) {layer = "h.1.mlp.fc_in", phase = backward} : tensor<64x16xf32>
    %permute_23 = aten.permute(%view.41, dims = [1, 0]) {layer = "h.1.mlp.fc_in", phase = backward} : tensor<64x64xf32>
    %mm.6 = aten.mm(%permute_23, %view.28) {layer = "h.1.mlp.fc_in", phase = backward} : tensor<64x16xf32>
    %sum.2 = aten.sum.dim_IntList(%view.41, dim = [0], keepdim = true) {layer = "h.1.mlp.fc_in", phase = backward} : tensor<1x64xf32>
    %view.42 = aten.view(%sum.2) {layer = "h.1.mlp.fc_in", phase = backward} : tensor<64xf32>
    %view.43 = aten.view(%mm.5) {layer = "h.1.mlp.fc_in", phase = backward} : tensor<8x8x16xf32>
    %native_layer_norm_backward.1, %native_layer_norm_backward.1_1, %native_layer_norm_backward.1_2 = aten.native_layer_norm_backward(%view.43, %add.3, %native_layer_norm.3_1, %native_layer_norm.3_2, %h.1.ln_2.weight, %h.1.ln_2.bias, output_mask = [true, true, true]) {layer = "h.1.ln_2", phase = backward} : tensor<8x8x16xf32>, tensor<16xf32>, tensor<16xf32>
    %add.5 = aten.add.Tensor(%native_layer_norm_backward, %native_layer_norm_backward.1) {layer = "", phase = backward} : tensor<8x8x16xf32>
    %view.44 = aten.view(%add.5) {layer = "h.1.attn.proj", phase = backward} : tensor<64x16xf32>
    %mm.7 = aten.mm(%view.44, %h.1.attn.proj.weight) {layer = "h.1.attn.proj", phase = backward} : tensor<64x16xf32>
    %permute_24 = aten.permute(%view.44, dims = [1, 0]) {layer = "h.1.attn.proj", phase = backward} : tensor<16x64xf32>
    %mm.8 = aten.mm(%permute_24, %view.26) {layer = "h.1.attn.proj", phase = backward} : tensor<16x16xf32>
    %sum.3 = aten.sum.dim_IntList(%view.44, dim = [0], keepdim = true) {layer = "h.1.attn.proj", phase = backward} : tensor<1x16xf32>
    %view.45 = aten.view(%sum.3) {layer = "h.1.attn.proj", phase = backward} : tensor<16xf32>
    %view.47 = aten.view(%mm.7) {layer = "h.1.attn", phase = backward} : tensor<8x8x4x4xf32>
    %permute_25 = aten.permute(%view.47, dims = [0, 2, 1, 3]) {layer = "h.1.attn", phase = backward} : tensor<8x4x8x4xf32>
    %_scaled_dot_product_flash_attention_for_cpu_backward, %_scaled_dot_product_flash_attention_for_cpu_backward_1, %_scaled_dot_product_flash_attention_for_cpu_backward_2 = aten._scaled_dot_product_flash_attention_for_cpu_backward(%permute_25, %permute_11, %permute_13, %permute_15, %_scaled_dot_product_flash_attention_for_cpu.1, %_scaled_dot_product_flash_attention_for_cpu.1_1, dropout_p = 0.0, is_causal = true) {layer = "h.1.attn", phase = backward} : tensor<8x4x8x4xf32>, tensor<8x4x8x4xf32>, tensor<8x4x8x4xf32>
    %permute_26 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu_backward_2, dims = [0, 2, 1, 3]) {layer = "h.1.attn", phase = backward} : tensor<8x8x4x4xf32>
    %view.49 = aten.view(%permute_26) {layer = "h.1.attn.v", phase = backward} : tensor<64x16xf32>
    %mm.9 = aten.mm(%view.49, %h.1.attn.v.weight) {layer = "h.1.attn.v", phase = backward} : tensor<64x16xf32>
    %permute_27 = aten.permute(%view.49, dims = [1, 0]) {layer = "h.1.attn.v", phase = backward} : tensor<16x64xf32>
    %mm.10 = aten.mm(%permute_27, %view.22) {layer = "h.1.attn.v", phase = backward} : tensor<16x16xf32>
    %sum.4 = aten.sum.dim_IntList(%view.49, dim = [0], keepdim = true) {layer = "h.1.attn.v", phase = backward} : tensor<1x16xf32>
    %view.50 = aten.view(%sum.4) {layer = "h.1.attn.v", phase = backward} : tensor<16xf32>
    %view.51 = aten.view(%mm.9) {layer = "h.1.attn.v", phase = backward} : tensor<8x8x16xf32>
    %permute_28 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu_backward_1, dims = [0, 2, 1, 3]) {layer = "h.1.attn", phase = backward} : tensor<8x8x4x4xf32>
    %view.53 = aten.view(%permute_28) {layer = "h.1.attn.k", phase = backward} : tensor<64x16xf32>
    %mm.11 = aten.mm(%view.53, %h.1.attn.k.weight) {layer = "h.1.attn.k", phase = backward} : tensor<64x16xf32>
    %permute_29 = aten.permute(%view.53, dims = [1, 0]) {layer = "h.1.attn.k", phase = backward} : tensor<16x64xf32>
    %mm.12 = aten.mm(%permute_29, %view.19) {layer = "h.1.attn.k", phase = backward} : tensor<16x16xf32>
    %sum.5 = aten.sum.dim_IntList(%view.53, dim = [0], keepdim = true) {layer = "h.1.attn.k", phase = backward} : tensor<1x16xf32>
    %view.54 = aten.view(%sum.5) {layer = "h.1.attn.k", phase = backward} : tensor<16xf32>
    %view.55 = aten.view(%mm.11) {layer = "h.1.attn.k", phase = backward} : tensor<8x8x16xf32>
    %add.6 = aten.add.Tensor(%view.51, %view.55) {layer = "h.1.attn", phase = backward} : tensor<8x8x16xf32>
    %permute_30 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu_backward, dims = [0, 2, 1, 3]) {layer = "h.1.attn", phase = backward} : tensor<8x8x4x4xf32>
    %view.57 = aten.view(%permute_30) {layer = "h.1.attn.q", phase = backward} : tensor<64x16xf32>
    %mm.13 = aten.mm(%view.57, %h.1.attn.q.weight) {layer = "h.1.attn.q", phase = backward} : tensor<64x16xf32>
    %permute_31 = aten.permute(%view.57, dims = [1, 0]) {layer = "h.1.attn.q", phase = backward} : tensor<16x64xf32>
    %mm.14 = aten.mm(%permute_31, %view.16) {layer = "h.1.attn.q", phase = backward} : tensor<16x16xf32>
    %sum.6 = aten.sum.dim_IntList(%view.57, dim = [0], keepdim = true) {layer = "h.1.attn.q", phase = backward} : tensor<1x16xf32>
    %view.58 = aten.view(%sum.6) {layer = "h.1.attn.q", phase = backward} : tensor<16xf32>
    %view.59 = aten.view(%mm.13) {layer = "h.1.attn.q", phase = backward} : tensor<8x8x16xf32>
    %add.7 = aten.add.Tensor(%add.6, %view.59) {layer = "h.1.attn", phase = backward} : tensor<8x8x16xf32>
    %native_layer_norm_backward.2, %native_layer_norm_backward.2_1, %native_layer_norm_backward.2_2 = aten.native_layer_norm_backward(%add.7, %add.2, %native_layer_norm.2_1, %native_layer_norm.2_2, %h.1.ln_1.weight, %h.1.ln_1.bias, output_mask = [true, true, true]) {layer = "h.1.ln_1", phase = backward} : tensor<8x8x16xf32>, tensor<16xf32>, tensor<16xf32>
    %add.8 = aten.add.Tensor(%add.5, %native_layer_norm_backward.2) {layer = "", phase = backward} : tensor<8x8x16xf32>
    %view.60 = aten.view(%add.8) {layer = "h.0.mlp.fc_out", phase = backward} : tensor<64x16xf32>
    %mm.15 = aten.mm(%view.60, %h.0.mlp.fc_out.weight) {layer = "h.0.mlp.fc_out", phase = backward} : tensor<64x64xf32>
    %permute_32 = aten.permute(%view.60, dims = [1, 0]) {layer = "h.0.mlp.fc_out", phase = backward} : tensor<16x64xf32>
    %mm.16 = aten.mm(%permute_32, %view.14) {layer = "h.0.mlp.fc_out", phase = backward} : tensor<16x64xf32>
    %sum.7 = aten.sum.dim_IntList(%view.60, dim = [0], keepdim = true) {layer = "h.0.mlp.fc_out", phase = backward} : tensor<1x16xf32>
    %view.61 = aten.view(%sum.7) {layer = "h.0.mlp.fc_out", phase = backward} : tensor<16xf32>
    %view.62 = aten.view(%mm.15) {layer = "h.0.mlp.fc_out", phase = backward} : tensor<8x8x64xf32>
    %gelu_backward.1 = aten.gelu_backward(%view.62, %view.13, approximate = "tanh") {layer = "h.0.mlp", phase = backward} : tensor<8x8x64xf32>
    %view.63 = aten.view(%gelu_backward.1) {layer = "h.0.mlp.fc_in", phase = backward} : tensor<64x64xf32>
    %mm.17 = aten.mm(%view.63, %h.0.mlp.fc_in.weight) {layer = "h.0.mlp.fc_in", phase = backward} : tensor<64x16xf32>
    %permute_33 = aten.permute(%view.63, dims = [1, 0]) {layer = "h.0.mlp.fc_in", phase = backward} : tensor<64x64xf32>
    %mm.18 = aten.mm(%permute_33, %view.12) {layer = "h.0.mlp.fc_in", phase = backward} : tensor<64x16xf32>
    %sum.8 = aten.sum.dim_IntList(%view.63, dim = [0], keepdim = true) {layer = "h.0.mlp.fc_in", phase = backward} : tensor<1x64xf32>
    %view.64 = aten.view(%sum.8) {layer = "h.0.mlp.fc_in", phase = backward} : tensor<64xf32>
    %view.65 = aten.view(%mm.17) {layer = "h.0.mlp.fc_in", phase = backward} : tensor<8x8x16xf32>
    %native_layer_norm_backward.3, %native_layer_norm_backward.3_1, %native_layer_norm_backward.3_2 = aten.native_layer_norm_backward(%view.65, %add.1, %native_layer_norm.1_1, %native_layer_norm.1_2, %h.0.ln_2.weight, %h.0.ln_2.bias, output_mask = [true, true, true]) {layer = "h.0.ln_2", phase = backward} : tensor<8x8x16xf32>, tensor<16xf32>, tensor<16xf32>
    %add.9 = aten.add.Tensor(%add.8, %native_layer_norm_backward.3) {layer = "", phase = backward} : tensor<8x8x16xf32>
    %view.66 = aten.view(%add.9) {layer = "h.0.attn.proj", phase = backward} : tensor<64x16xf32>
    %mm.19 = aten.mm(%view.66, %h.0.attn.proj.weight) {layer = "h.0.attn.proj", phase = backward} : tensor<64x16xf32>
    %permute_34 = aten.permute(%view.66, dims = [1, 0]) {layer = "h.0.attn.proj", phase = backward} : tensor<16x64xf32>
    %mm.20 = aten.mm(%permute_34, %view.10) {layer = "h.0.attn.proj", phase = backward} : tensor<16x16xf32>
    %sum.9 = aten.sum.dim_IntList(%view.66, dim = [0], keepdim = true) {layer = "h.0.attn.proj", phase = backward} : tensor<1x16xf32>
    %view.67 = aten.view(%sum.9) {layer = "h.0.attn.proj", phase = backward} : tensor<16xf32>
    %view.69 = aten.view(%mm.19) {layer = "h.0.attn", phase = backward} : tensor<8x8x4x4xf32>
    %permute_35 = aten.permute(%view.69, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = backward} : tensor<8x4x8x4xf32>
    %_scaled_dot_product_flash_attention_for_cpu_backward.1, %_scaled_dot_product_flash_attention_for_cpu_backward.1_1, %_scaled_dot_product_flash_attention_for_cpu_backward.1_2 = aten._scaled_dot_product_flash_attention_for_cpu_backward(%permute_35, %permute_1, %permute_3, %permute_5, %_scaled_dot_product_flash_attention_for_cpu, %_scaled_dot_product_flash_attention_for_cpu_1, dropout_p = 0.0, is_causal = true) {layer = "h.0.attn", phase = backward} : tensor<8x4x8x4xf32>, tensor<8x4x8x4xf32>, tensor<8x4x8x4xf32>
    %permute_36 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu_backward.1_2, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = backward} : tensor<8x8x4x4xf32>
    %view.71 = aten.view(%permute_36) {layer = "h.0.attn.v", phase = backward} : tensor<64x16xf32>
    %mm.21 = aten.mm(%view.71, %h.0.attn.v.weight) {layer = "h.0.attn.v", phase = backward} : tensor<64x16xf32>
    %permute_37 = aten.permute(%view.71, dims = [1, 0]) {layer = "h.0.attn.v", phase = backward} : tensor<16x64xf32>
    %mm.22 = aten.mm(%permute_37, %view.6) {layer = "h.0.attn.v", phase = backward} : tensor<16x16xf32>
    %sum.10 = aten.sum.dim_IntList(%view.71, dim = [0], keepdim = true) {layer = "h.0.attn.v", phase = backward} : tensor<1x16xf32>
    %view.72 = aten.view(%sum.10) {layer = "h.0.attn.v", phase = backward} : tensor<16xf32>
    %view.73 = aten.view(%mm.21) {layer = "h.0.attn.v", phase = backward} : tensor<8x8x16xf32>
    %permute_38 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu_backward.1_1, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = backward} : tensor<8x8x4x4xf32>
    %view.75 = aten.view(%permute_38) {layer = "h.0.attn.k", phase = backward} : tensor<64x16xf32>
    %mm.23 = aten.mm(%view.75, %h.0.attn.k.weight) {layer = "h.0.attn.k", phase = backward} : tensor<64x16xf32>
    %permute_39 = aten.permute(%view.75, dims = [1, 0]) {layer = "h.0.attn.k", phase = backward} : tensor<16x64xf32>
    %mm.24 = aten.mm(%permute_39, %view.3) {layer = "h.0.attn.k", phase = backward} : tensor<16x16xf32>
    %sum.11 = aten.sum.dim_IntList(%view.75, dim = [0], keepdim = true) {layer = "h.0.attn.k", phase = backward} : tensor<1x16xf32>
    %view.76 = aten.view(%sum.11) {layer = "h.0.attn.k", phase = backward} : tensor<16xf32>
    %view.77 = aten.view(%mm.23) {layer = "h.0.attn.k", phase = backward} : tensor<8x8x16xf32>
    %add.10 = aten.add.Tensor(%view.73, %view.77) {layer = "h.0.attn", phase = backward} : tensor<8x8x16xf32>
    %permute_40 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu_backward.1, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = backward} : tensor<8x8x4x4xf32>
    %view.79 = aten.view(%permute_40) {layer = "h.0.attn.q", phase = backward} : tensor<64x16xf32>
    %mm.25 = aten.mm(%view.79, %h.0.attn.q.weight) {layer = "h.0.attn.q", phase = backward} : tensor<64x16xf32>
    %permute_41 = aten.permute(%view.79, dims = [1, 0]) {layer = "h.0.attn.q", phase = backward} : tensor<16x64xf32>
    %mm.26 = aten.mm(%permute_41, %view) {layer = "h.0.attn.q", phase = backward} : tensor<16x16xf32>
    %sum.12 = aten.sum.dim_IntList(%view.79, dim = [0], keepdim = true) {layer = "h.0.attn.q", phase = backward} : tensor<1x16xf32>
    %view.80 = aten.view(%sum.12) {layer = "h.0.attn.q", phase = backward} : tensor<16xf32>
    %view.81 = aten.view(%mm.25) {layer = "h.0.attn.q", phase = backward} : tensor<8x8x16xf32>
    %add.11 = aten.add.Tensor(%add.10, %view.81) {layer = "h.0.attn", phase = backward} : tensor<8x8x16xf32>
    %native_layer_norm_backward.4, %native_layer_norm_backward.4_1, %native_layer_norm_backward.4_2 = aten.native_layer_norm_backward(%add.11, %add, %native_layer_norm_1, %native_layer_norm_2, %h.0.ln_1.weight, %h.0.ln_1.bias, output_mask = [true, true, true]) {layer = "h.0.ln_1", phase = backward} : tensor<8x8x16xf32>, tensor<16xf32>, tensor<16xf32>
    %add.12 = aten.add.Tensor(%add.9, %native_layer_norm_backward.4) {layer = "", phase = backward} : tensor<8x8x16xf32>
    %sum.13 = aten.sum.dim_IntList(%add.12, dim = [0], keepdim = true) {layer = "", phase = backward} : tensor<1x8x16xf32>
    %view.82 = aten.view(%sum.13) {layer = "", phase = backward} : tensor<8x16xf32>
    %embedding_dense_backward = aten.embedding_dense_backward(%view.82, %arange, padding_idx = -1, scale_grad_by_freq = false) {layer = "wpe", phase = backward} : tensor<8x16xf32>
    %embedding_dense_backward.1 = aten.embedding_dense_backward(%add.12, %input_ids, padding_idx = -1, scale_grad_by_freq = false) {layer = "wte", phase = backward} : tensor<32x16xf32>
    %add.13 = aten.add.Tensor(%mm.1, %embedding_dense_backward.1) {layer = "", phase = backward} : tensor<32x16xf32>
    func.return %div, %add.13, %embedding_dense_backward, %native_layer_norm_backward.4_1, %native_layer_norm_backward.4_2, %mm.26, %view.80, %mm.24, %view.76, %mm.22, %view.72, %mm.20, %view.67, %native_layer_norm_backward.3_1, %native_layer_norm_backward.3_2, %mm.18, %view.64, %mm.16, %view.61, %native_layer_norm_backward.2_1, %native_layer_norm_backward.2_2, %mm.14, %view.58, %mm.12, %view.54, %mm.10, %view.50, %mm.8, %view.45, %native_layer_norm_backward.1_1, %native_layer_norm_backward.1_2, %mm.6, %view.42, %mm.4, %view.39, %native_layer_norm_backward_1, %native_layer_norm_backward_2 : tensor<f32>, tensor<32x16xf32>, tensor<8x16xf32>, tensor<16xf32>, tensor<16xf32>, tensor<16x16xf32>, tensor<16xf32>, tensor<16x16xf32>, tensor<16xf32>, tensor<16x16xf32>, tensor<16xf32>, tensor<16x16xf32>, tensor<16xf32>, tensor<16xf32>, tensor<16xf32>, tensor<64x16xf32>, tensor<64xf32>, tensor<16x64xf32>, tensor<16xf32>, tensor<16xf32>, tensor<16xf32>, tensor<16x16xf32>, tensor<16xf32>, tensor<16x16xf32>, tensor<16xf32>, tensor<16x16xf32>, tensor<16xf32>, tensor<16x16xf32>, tensor<16xf32>, tensor<16xf32>, tensor<16xf32>, tensor<64x16xf32>, tensor<64xf32>, tensor<16x64xf32>, tensor<16xf32>, tensor<16xf32>, tensor<16xf32>
  }
}
