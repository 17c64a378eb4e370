builtin.module {
  func.func @step(%wte.weight: tensor<16x8xf32> {dist.kind = "param", dist.name = "wte.weight"}, %wpe.weight: tensor<4x8xf32> {dist.kind = "param", dist.name = "wpe.weight"}, %h.0.ln_1.weight: tensor<8xf32> {dist.kind = "param", dist.name = "h.0.ln_1.weight"}, %h.0.ln_1.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.0.ln_1.bias"}, %h.0.attn.q.weight: tensor<8x8xf32> {dist.kind = "param", dist.name = "h.0.attn.q.weight"}, %h.0.attn.q.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.0.attn.q.bias"}, %h.0.attn.k.weight: tensor<8x8xf32> {dist.kind = "param", dist.name = "h.0.attn.k.weight"}, %h.0.attn.k.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.0.attn.k.bias"}, %h.0.attn.v.weight: tensor<8x8xf32> {dist.kind = "param", dist.name = "h.0.attn.v.weight"}, %h.0.attn.v.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.0.attn.v.bias"}, %h.0.attn.proj.weight: tensor<8x8xf32> {dist.kind = "param", dist.name = "h.0.attn.proj.weight"}, %h.0.attn.proj.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.0.attn.proj.bias"}, %h.0.ln_2.weight: tensor<8xf32> {dist.kind = "param", dist.name = "h.0.ln_2.weight"}, %h.0.ln_2.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.0.ln_2.bias"}, %h.0.mlp.fc_in.weight: tensor<32x8xf32> {dist.kind = "param", dist.name = "h.0.mlp.fc_in.weight"}, %h.0.mlp.fc_in.bias: tensor<32xf32> {dist.kind = "param", dist.name = "h.0.mlp.fc_in.bias"}, %h.0.mlp.fc_out.weight: tensor<8x32xf32> {dist.kind = "param", dist.name = "h.0.mlp.fc_out.weight"}, %h.0.mlp.fc_out.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.0.mlp.fc_out.bias"}, %h.1.ln_1.weight: tensor<8xf32> {dist.kind = "param", dist.name = "h.1.ln_1.weight"}, %h.1.ln_1.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.1.ln_1.bias"}, %h.1.attn.q.weight: tensor<8x8xf32> {dist.kind = "param", dist.name = "h.1.attn.q.weight"}, %h.1.attn.q.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.1.attn.q.bias"}, %h.1.attn.k.weight: tensor<8x8xf32> {dist.kind = "param", dist.name = "h.1.attn.k.weight"}, %h.1.attn.k.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.1.attn.k.bias"}, %h.1.attn.v.weight: tensor<8x8xf32> {dist.kind = "param", dist.name = "h.1.attn.v.weight"}, %h.1.attn.v.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.1.attn.v.bias"}, %h.1.attn.proj.weight: tensor<8x8xf32> {dist.kind = "param", dist.name = "h.1.attn.proj.weight"}, %h.1.attn.proj.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.1.attn.proj.bias"}, %h.1.ln_2.weight: tensor<8xf32> {dist.kind = "param", dist.name = "h.1.ln_2.weight"}, %h.1.ln_2.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.1.ln_2.bias"}, %h.1.mlp.fc_in.weight: tensor<32x8xf32> {dist.kind = "param", dist.name = "h.1.mlp.fc_in.weight"}, %h.1.mlp.fc_in.bias: tensor<32xf32> {dist.kind = "param", dist.name = "h.1.mlp.fc_in.bias"}, %h.1.mlp.fc_out.weight: tensor<8x32xf32> {dist.kind = "param", dist.name = "h.1.mlp.fc_out.weight"}, %h.1.mlp.fc_out.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.1.mlp.fc_out.bias"}, %h.2.ln_1.weight: tensor<8xf32> {dist.kind = "param", dist.name = "h.2.ln_1.weight"}, %h.2.ln_1.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.2.ln_1.bias"}, %h.2.attn.q.weight: tensor<8x8xf32> {dist.kind = "param", dist.name = "h.2.attn.q.weight"}, %h.2.attn.q.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.2.attn.q.bias"}, %h.2.attn.k.weight: tensor<8x8xf32> {dist.kind = "param", dist.name = "h.2.attn.k.weight"}, %h.2.attn.k.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.2.attn.k.bias"}, %h.2.attn.v.weight: tensor<8x8xf32> {dist.kind = "param", dist.name = "h.2.attn.v.weight"}, %h.2.attn.v.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.2.attn.v.bias"}, %h.2.attn.proj.weight: tensor<8x8xf32> {dist.kind = "param", dist.name = "h.2.attn.proj.weight"}, %h.2.attn.proj.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.2.attn.proj.bias"}, %h.2.ln_2.weight: tensor<8xf32> {dist.kind = "param", dist.name = "h.2.ln_2.weight"}, %h.2.ln_2.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.2.ln_2.bias"}, %h.2.mlp.fc_in.weight: tensor<32x8xf32> {dist.kind = "param", dist.name = "h.2.mlp.fc_in.weight"}, %h.2.mlp.fc_in.bias: tensor<32xf32> {dist.kind = "param", dist.name = "h.2.mlp.fc_in.bias"}, %h.2.mlp.fc_out.weight: tensor<8x32xf32> {dist.kind = "param", dist.name = "h.2.mlp.fc_out.weight"}, %h.2.mlp.fc_out.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.2.mlp.fc_out.bias"}, %h.3.ln_1.weight: tensor<8xf32> {dist.kind = "param", dist.name = "h.3.ln_1.weight"}, %h.3.ln_1.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.3.ln_1.bias"}, %h.3.attn.q.weight: tensor<8x8xf32> {dist.kind = "param", dist.name = "h.3.attn.q.weight"}, %h.3.attn.q.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.3.attn.q.bias"}, %h.3.attn.k.weight: tensor<8x8xf32> {dist.kind = "param", dist.name = "h.3.attn.k.weight"}, %h.3.attn.k.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.3.attn.k.bias"}, %h.3.attn.v.weight: tensor<8x8xf32> {dist.kind = "param", dist.name = "h.3.attn.v.weight"}, %h.3.attn.v.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.3.attn.v.bias"}, %h.3.attn.proj.weight: tensor<8x8xf32> {dist.kind = "param", dist.name = "h.3.attn.proj.weight"}, %h.3.attn.proj.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.3.attn.proj.bias"}, %h.3.ln_2.weight: tensor<8xf32> {dist.kind = "param", dist.name = "h.3.ln_2.weight"}, %h.3.ln_2.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.3.ln_2.bias"}, %h.3.mlp.fc_in.weight: tensor<32x8xf32> {dist.kind = "param", dist.name = "h.3.mlp.fc_in.weight"}, %h.3.mlp.fc_in.bias: tensor<32xf32> {dist.kind = "param", dist.name = "h.3.mlp.fc_in.bias"}, %h.3.mlp.fc_out.weight: tensor<8x32xf32> {dist.kind = "param", dist.name = "h.3.mlp.fc_out.weight"}, %h.3.mlp.fc_out.bias: tensor<8xf32> {dist.kind = "param", dist.name = "h.3.mlp.fc_out.bias"}, %ln_f.weight: tensor<8xf32> {dist.kind = "param", dist.name = "ln_f.weight"}, %ln_f.bias: tensor<8xf32> {dist.kind = "param", dist.name = "ln_f.bias"}, %head.weight: tensor<16x8xf32> {dist.kind = "param", dist.name = "head.weight"}, %input_ids: tensor<8x4xi64> {dist.kind = "input", dist.name = "input_ids"}, %labels: tensor<8x4xi64> {dist.kind = "input", dist.name = "labels"}, %tangent: tensor<f32> {dist.kind = "tangent", dist.name = "loss"}) -> (tensor<f32> {dist.kind = "output", dist.name = "0"}, tensor<16x8xf32> {dist.kind = "grad", dist.name = "wte.weight"}, tensor<4x8xf32> {dist.kind = "grad", dist.name = "wpe.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.0.ln_1.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.0.ln_1.bias"}, tensor<8x8xf32> {dist.kind = "grad", dist.name = "h.0.attn.q.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.0.attn.q.bias"}, tensor<8x8xf32> {dist.kind = "grad", dist.name = "h.0.attn.k.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.0.attn.k.bias"}, tensor<8x8xf32> {dist.kind = "grad", dist.name = "h.0.attn.v.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.0.attn.v.bias"}, tensor<8x8xf32> {dist.kind = "grad", dist.name = "h.0.attn.proj.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.0.attn.proj.bias"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.0.ln_2.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.0.ln_2.bias"}, tensor<32x8xf32> {dist.kind = "grad", dist.name = "h.0.mlp.fc_in.weight"}, tensor<32xf32> {dist.kind = "grad", dist.name = "h.0.mlp.fc_in.bias"}, tensor<8x32xf32> {dist.kind = "grad", dist.name = "h.0.mlp.fc_out.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.0.mlp.fc_out.bias"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.1.ln_1.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.1.ln_1.bias"}, tensor<8x8xf32> {dist.kind = "grad", dist.name = "h.1.attn.q.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.1.attn.q.bias"}, tensor<8x8xf32> {dist.kind = "grad", dist.name = "h.1.attn.k.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.1.attn.k.bias"}, tensor<8x8xf32> {dist.kind = "grad", dist.name = "h.1.attn.v.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.1.attn.v.bias"}, tensor<8x8xf32> {dist.kind = "grad", dist.name = "h.1.attn.proj.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.1.attn.proj.bias"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.1.ln_2.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.1.ln_2.bias"}, tensor<32x8xf32> {dist.kind = "grad", dist.name = "h.1.mlp.fc_in.weight"}, tensor<32xf32> {dist.kind = "grad", dist.name = "h.1.mlp.fc_in.bias"}, tensor<8x32xf32> {dist.kind = "grad", dist.name = "h.1.mlp.fc_out.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.1.mlp.fc_out.bias"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.2.ln_1.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.2.ln_1.bias"}, tensor<8x8xf32> {dist.kind = "grad", dist.name = "h.2.attn.q.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.2.attn.q.bias"}, tensor<8x8xf32> {dist.kind = "grad", dist.name = "h.2.attn.k.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.2.attn.k.bias"}, tensor<8x8xf32> {dist.kind = "grad", dist.name = "h.2.attn.v.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.2.attn.v.bias"}, tensor<8x8xf32> {dist.kind = "grad", dist.name = "h.2.attn.proj.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.2.attn.proj.bias"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.2.ln_2.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.2.ln_2.bias"}, tensor<32x8xf32> {dist.kind = "grad", dist.name = "h.2.mlp.fc_in.weight"}, tensor<32xf32> {dist.kind = "grad", dist.name = "h.2.mlp.fc_in.bias"}, tensor<8x32xf32> {dist.kind = "grad", dist.name = "h.2.mlp.fc_out.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.2.mlp.fc_out.bias"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.3.ln_1.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.3.ln_1.bias"}, tensor<8x8xf32> {dist.kind = "grad", dist.name = "h.3.attn.q.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.3.attn.q.bias"}, tensor<8x8xf32> {dist.kind = "grad", dist.name = "h.3.attn.k.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.3.attn.k.bias"}, tensor<8x8xf32> {dist.kind = "grad", dist.name = "h.3.attn.v.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.3.attn.v.bias"}, tensor<8x8xf32> {dist.kind = "grad", dist.name = "h.3.attn.proj.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.3.attn.proj.bias"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.3.ln_2.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.3.ln_2.bias"}, tensor<32x8xf32> {dist.kind = "grad", dist.name = "h.3.mlp.fc_in.weight"}, tensor<32xf32> {dist.kind = "grad", dist.name = "h.3.mlp.fc_in.bias"}, tensor<8x32xf32> {dist.kind = "grad", dist.name = "h.3.mlp.fc_out.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "h.3.mlp.fc_out.bias"}, tensor<8xf32> {dist.kind = "grad", dist.name = "ln_f.weight"}, tensor<8xf32> {dist.kind = "grad", dist.name = "ln_f.bias"}, tensor<16x8xf32> {dist.kind = "grad", dist.name = "head.weight"}) {
    %arange = aten.arange.start_step(start = 0) {layer = "", phase = forward} : tensor<4xi64>
    %embedding = aten.embedding(%wte.weight, %input_ids) {layer = "wte", phase = forward} : tensor<8x4x8xf32>
    %embedding.1 = aten.embedding(%wpe.weight, %arange) {layer = "wpe", phase = forward} : tensor<4x8xf32>
    %add = aten.add.Tensor(%embedding, %embedding.1) {layer = "", phase = forward} : tensor<8x4x8xf32>
    %native_layer_norm, %native_layer_norm_1, %native_layer_norm_2 = aten.native_layer_norm(%add, %h.0.ln_1.weight, %h.0.ln_1.bias, eps = 1.0e-05) {layer = "h.0.ln_1", phase = forward} : tensor<8x4x8xf32>, tensor<8x4x1xf32>, tensor<8x4x1xf32>
    %view = aten.view(%native_layer_norm) {layer = "h.0.attn.q", phase = forward} : tensor<32x8xf32>
    %permute = aten.permute(%h.0.attn.q.weight, dims = [1, 0]) {layer = "h.0.attn.q", phase = forward} : tensor<8x8xf32>
    %addmm = aten.addmm(%h.0.attn.q.bias, %view, %permute) {layer = "h.0.attn.q", phase = forward} : tensor<32x8xf32>
    %view.2 = aten.view(%addmm) {layer = "h.0.attn", phase = forward} : tensor<8x4x2x4xf32>
    %permute_1 = aten.permute(%view.2, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = forward} : tensor<8x2x4x4xf32>
    %view.3 = aten.view(%native_layer_norm) {layer = "h.0.attn.k", phase = forward} : tensor<32x8xf32>
    %permute_2 = aten.permute(%h.0.attn.k.weight, dims = [1, 0]) {layer = "h.0.attn.k", phase = forward} : tensor<8x8xf32>
    %addmm.1 = aten.addmm(%h.0.attn.k.bias, %view.3, %permute_2) {layer = "h.0.attn.k", phase = forward} : tensor<32x8xf32>
    %view.5 = aten.view(%addmm.1) {layer = "h.0.attn", phase = forward} : tensor<8x4x2x4xf32>
    %permute_3 = aten.permute(%view.5, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = forward} : tensor<8x2x4x4xf32>
    %view.6 = aten.view(%native_layer_norm) {layer = "h.0.attn.v", phase = forward} : tensor<32x8xf32>
    %permute_4 = aten.permute(%h.0.attn.v.weight, dims = [1, 0]) {layer = "h.0.attn.v", phase = forward} : tensor<8x8xf32>
    %addmm.2 = aten.addmm(%h.0.attn.v.bias, %view.6, %permute_4) {layer = "h.0.attn.v", phase = forward} : tensor<32x8xf32>
    %view.8 = aten.view(%addmm.2) {layer = "h.0.attn", phase = forward} : tensor<8x4x2x4xf32>
    %permute_5 = aten.permute(%view.8, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = forward} : tensor<8x2x4x4xf32>
    %_scaled_dot_product_flash_attention_for_cpu, %_scaled_dot_product_flash_attention_for_cpu_1 = aten._scaled_dot_product_flash_attention_for_cpu(%permute_1, %permute_3, %permute_5, is_causal = true) {layer = "h.0.attn", phase = forward} : tensor<8x2x4x4xf32>, tensor<8x2x4xf32>
    %permute_6 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = forward} : tensor<8x4x2x4xf32>
    %view.10 = aten.view(%permute_6) {layer = "h.0.attn.proj", phase = forward} : tensor<32x8xf32>
    %permute_7 = aten.permute(%h.0.attn.proj.weight, dims = [1, 0]) {layer = "h.0.attn.proj", phase = forward} : tensor<8x8xf32>
    %addmm.3 = aten.addmm(%h.0.attn.proj.bias, %view.10, %permute_7) {layer = "h.0.attn.proj", phase = forward} : tensor<32x8xf32>
    %view.11 = aten.view(%addmm.3) {layer = "h.0.attn.proj", phase = forward} : tensor<8x4x8xf32>
    %add.1 = aten.add.Tensor(%add, %view.11) {layer = "h.0", phase = forward} : tensor<8x4x8xf32>
    %native_layer_norm.1, %native_layer_norm.1_1, %native_layer_norm.1_2 = aten.native_layer_norm(%add.1, %h.0.ln_2.weight, %h.0.ln_2.bias, eps = 1.0e-05) {layer = "h.0.ln_2", phase = forward} : tensor<8x4x8xf32>, tensor<8x4x1xf32>, tensor<8x4x1xf32>
    %view.12 = aten.view(%native_layer_norm.1) {layer = "h.0.mlp.fc_in", phase = forward} : tensor<32x8xf32>
    %permute_8 = aten.permute(%h.0.mlp.fc_in.weight, dims = [1, 0]) {layer = "h.0.mlp.fc_in", phase = forward} : tensor<8x32xf32>
    %addmm.4 = aten.addmm(%h.0.mlp.fc_in.bias, %view.12, %permute_8) {layer = "h.0.mlp.fc_in", phase = forward} : tensor<32x32xf32>
    %view.13 = aten.view(%addmm.4) {layer = "h.0.mlp.fc_in", phase = forward} : tensor<8x4x32xf32>
    %gelu = aten.gelu(%view.13, approximate = "tanh") {layer = "h.0.mlp", phase = forward} : tensor<8x4x32xf32>
    %view.14 = aten.view(%gelu) {layer = "h.0.mlp.fc_out", phase = forward} : tensor<32x32xf32>
    %permute_9 = aten.permute(%h.0.mlp.fc_out.weight, dims = [1, 0]) {layer = "h.0.mlp.fc_out", phase = forward} : tensor<32x8xf32>
    %addmm.5 = aten.addmm(%h.0.mlp.fc_out.bias, %view.14, %permute_9) {layer = "h.0.mlp.fc_out", phase = forward} : tensor<32x8xf32>
    %view.15 = aten.view(%addmm.5) {layer = "h.0.mlp.fc_out", phase = forward} : tensor<8x4x8xf32>
    %add.2 = aten.add.Tensor(%add.1, %view.15) {layer = "h.0", phase = forward} : tensor<8x4x8xf32>
    %native_layer_norm.2, %native_layer_norm.2_1, %native_layer_norm.2_2 = aten.native_layer_norm(%add.2, %h.1.ln_1.weight, %h.1.ln_1.bias, eps = 1.0e-05) {layer = "h.1.ln_1", phase = forward} : tensor<8x4x8xf32>, tensor<8x4x1xf32>, tensor<8x4x1xf32>
    %view.16 = aten.view(%native_layer_norm.2) {layer = "h.1.attn.q", phase = forward} : tensor<32x8xf32>
    %permute_10 = aten.permute(%h.1.attn.q.weight, dims = [1, 0]) {layer = "h.1.attn.q", phase = forward} : tensor<8x8xf32>
    %addmm.6 = aten.addmm(%h.1.attn.q.bias, %view.16, %permute_10) {layer = "h.1.attn.q", phase = forward} : tensor<32x8xf32>
    %view.18 = aten.view(%addmm.6) {layer = "h.1.attn", phase = forward} : tensor<8x4x2x4xf32>
    %permute_11 = aten.permute(%view.18, dims = [0, 2, 1, 3]) {layer = "h.1.attn", phase = forward} : tensor<8x2x4x4xf32>
    %view.19 = aten.view(%native_layer_norm.2) {layer = "h.1.attn.k", phase = forward} : tensor<32x8xf32>
    %permute_12 = aten.permute(%h.1.attn.k.weight, dims = [1, 0]) {layer = "h.1.attn.k", phase = forward} : tensor<8x8xf32>
    %addmm.7 = aten.addmm(%h.1.attn.k.bias, %view.19, %permute_12) {layer = "h.1.attn.k", phase = forward} : tensor<32x8xf32>
    %view.21 = aten.view(%addmm.7) {layer = "h.1.attn", phase = forward} : tensor<8x4x2x4xf32>
    %permute_13 = aten.permute(%view.21, dims = [0, 2, 1, 3]) {layer = "h.1.attn", phase = forward} : tensor<8x2x4x4xf32>
    %view.22 = aten.view(%native_layer_norm.2) {layer = "h.1.attn.v", phase = forward} : tensor<32x8xf32>
    %permute_14 = aten.permute(%h.1.attn.v.weight, dims = [1, 0]) {layer = "h.1.attn.v", phase = forward} : tensor<8x8xf32>
    %addmm.8 = aten.addmm(%h.1.attn.v.bias, %view.22, %permute_14) {layer = "h.1.attn.v", phase = forward} : tensor<32x8xf32>
    %view.24 = aten.view(%addmm.8) {layer = "h.1.attn", phase = forward} : tensor<8x4x2x4xf32>
    %permute_15 = aten.permute(%view.24, dims = [0, 2, 1, 3]) {layer = "h.1.attn", phase = forward} : tensor<8x2x4x4xf32>
    %_scaled_dot_product_flash_attention_for_cpu.1, %_scaled_dot_product_flash_attention_for_cpu.1_1 = aten._scaled_dot_product_flash_attention_for_cpu(%permute_11, %permute_13, %permute_15, is_causal = true) {layer = "h.1.attn", phase = forward} : tensor<8x2x4x4xf32>, tensor<8x2x4xf32>
    %permute_16 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu.1, dims = [0, 2, 1, 3]) {layer = "h.1.attn", phase = forward} : tensor<8x4x2x4xf32>
    %view.26 = aten.view(%permute_16) {layer = "h.1.attn.proj", phase = forward} : tensor<32x8xf32>
    %permute_17 = aten.permute(%h.1.attn.proj.weight, dims = [1, 0]) {layer = "h.1.attn.proj", phase = forward} : tensor<8x8xf32>
    %addmm.9 = aten.addmm(%h.1.attn.proj.bias, %view.26, %permute_17) {layer = "h.1.attn.proj", phase = forward} : tensor<32x8xf32>
    %view.27 = aten.view(%addmm.9) {layer = "h.1.attn.proj", phase = forward} : tensor<8x4x8xf32>
    %add.3 = aten.add.Tensor(%add.2, %view.27) {layer = "h.1", phase = forward} : tensor<8x4x8xf32>
    %native_layer_norm.3, %native_layer_norm.3_1, %native_layer_norm.3_2 = aten.native_layer_norm(%add.3, %h.1.ln_2.weight, %h.1.ln_2.bias, eps = 1.0e-05) {layer = "h.1.ln_2", phase = forward} : tensor<8x4x8xf32>, tensor<8x4x1xf32>, tensor<8x4x1xf32>
    %view.28 = aten.view(%native_layer_norm.3) {layer = "h.1.mlp.fc_in", phase = forward} : tensor<32x8xf32>
    %permute_18 = aten.permute(%h.1.mlp.fc_in.weight, dims = [1, 0]) {layer = "h.1.mlp.fc_in", phase = forward} : tensor<8x32xf32>
    %addmm.10 = aten.addmm(%h.1.mlp.fc_in.bias, %view.28, %permute_18) {layer = "h.1.mlp.fc_in", phase = forward} : tensor<32x32xf32>
    %view.29 = aten.view(%addmm.10) {layer = "h.1.mlp.fc_in", phase = forward} : tensor<8x4x32xf32>
    %gelu.1 = aten.gelu(%view.29, approximate = "tanh") {layer = "h.1.mlp", phase = forward} : tensor<8x4x32xf32>
    %view.30 = aten.view(%gelu.1) {layer = "h.1.mlp.fc_out", phase = forward} : tensor<32x32xf32>
    %permute_19 = aten.permute(%h.1.mlp.fc_out.weight, dims = [1, 0]) {layer = "h.1.mlp.fc_out", phase = forward} : tensor<32x8xf32>
    %addmm.11 = aten.addmm(%h.1.mlp.fc_out.bias, %view.30, %permute_19) {layer = "h.1.mlp.fc_out", phase = forward} : tensor<32x8xf32>
    %view.31 = aten.view(%addmm.11) {layer = "h.1.mlp.fc_out", phase = forward} : tensor<8x4x8xf32>
    %add.4 = aten.add.Tensor(%add.3, %view.31) {layer = "h.1", phase = forward} : tensor<8x4x8xf32>
    %native_layer_norm.4, %native_layer_norm.4_1, %native_layer_norm.4_2 = aten.native_layer_norm(%add.4, %h.2.ln_1.weight, %h.2.ln_1.bias, eps = 1.0e-05) {layer = "h.2.ln_1", phase = forward} : tensor<8x4x8xf32>, tensor<8x4x1xf32>, tensor<8x4x1xf32>
    %view.32 = aten.view(%native_layer_norm.4) {layer = "h.2.attn.q", phase = forward} : tensor<32x8xf32>
    %permute_20 = aten.permute(%h.2.attn.q.weight, dims = [1, 0]) {layer = "h.2.attn.q", phase = forward} : tensor<8x8xf32>
    %addmm.12 = aten.addmm(%h.2.attn.q.bias, %view.32, %permute_20) {layer = "h.2.attn.q", phase = forward} : tensor<32x8xf32>
    %view.34 = aten.view(%addmm.12) {layer = "h.2.attn", phase = forward} : tensor<8x4x2x4xf32>
    %permute_21 = aten.permute(%view.34, dims = [0, 2, 1, 3]) {layer = "h.2.attn", phase = forward} : tensor<8x2x4x4xf32>
    %view.35 = aten.view(%native_layer_norm.4) {layer = "h.2.attn.k", phase = forward} : tensor<32x8xf32>
    %permute_22 = aten.permute(%h.2.attn.k.weight, dims = [1, 0]) {layer = "h.2.attn.k", phase = forward} : tensor<8x8xf32>
    %addmm.13 = aten.addmm(%h.2.attn.k.bias, %view.35, %permute_22) {layer = "h.2.attn.k", phase = forward} : tensor<32x8xf32>
    %view.37 = aten.view(%addmm.13) {layer = "h.2.attn", phase = forward} : tensor<8x4x2x4xf32>
    %permute_23 = aten.permute(%view.37, dims = [0, 2, 1, 3]) {layer = "h.2.attn", phase = forward} : tensor<8x2x4x4xf32>
    %view.38 = aten.view(%native_layer_norm.4) {layer = "h.2.attn.v", phase = forward} : tensor<32x8xf32>
    %permute_24 = aten.permute(%h.2.attn.v.weight, dims = [1, 0]) {layer = "h.2.attn.v", phase = forward} : tensor<8x8xf32>
    %addmm.14 = aten.addmm(%h.2.attn.v.bias, %view.38, %permute_24) {layer = "h.2.attn.v", phase = forward} : tensor<32x8xf32>
    %view.40 = aten.view(%addmm.14) {layer = "h.2.attn", phase = forward} : tensor<8x4x2x4xf32>
    %permute_25 = aten.permute(%view.40, dims = [0, 2, 1, 3]) {layer = "h.2.attn", phase = forward} : tensor<8x2x4x4xf32>
    %_scaled_dot_product_flash_attention_for_cpu.2, %_scaled_dot_product_flash_attention_for_cpu.2_1 = aten._scaled_dot_product_flash_attention_for_cpu(%permute_21, %permute_23, %permute_25, is_causal = true) {layer = "h.2.attn", phase = forward} : tensor<8x2x4x4xf32>, tensor<8x2x4xf32>
    %permute_26 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu.2, dims = [0, 2, 1, 3]) {layer = "h.2.attn", phase = forward} : tensor<8x4x2x4xf32>
    %view.42 = aten.view(%permute_26) {layer = "h.2.attn.proj", phase = forward} : tensor<32x8xf32>
    %permute_27 = aten.permute(%h.2.attn.proj.weight, dims = [1, 0]) {layer = "h.2.attn.proj", phase = forward} : tensor<8x8xf32>
    %addmm.15 = aten.addmm(%h.2.attn.proj.bias, %view.42, %permute_27) {layer = "h.2.attn.proj", phase = forward} : tensor<32x8xf32>
    %view.43 = aten.view(%addmm.15) {layer = "h.2.attn.proj", phase = forward} : tensor<8x4x8xf32>
    %add.5 = aten.add.Tensor(%add.4, %view.43) {layer = "h.2", phase = forward} : tensor<8x4x8xf32>
    %native_layer_norm.5, %native_layer_norm.5_1, %native_layer_norm.5_2 = aten.native_layer_norm(%add.5, %h.2.ln_2.weight, %h.2.ln_2.bias, eps = 1.0e-05) {layer = "h.2.ln_2", phase = forward} : tensor<8x4x8xf32>, tensor<8x4x1xf32>, tensor<8x4x1xf32>
    %view.44 = aten.view(%native_layer_norm.5) {layer = "h.2.mlp.fc_in", phase = forward} : tensor<32x8xf32>
    %permute_28 = aten.permute(%h.2.mlp.fc_in.weight, dims = [1, 0]) {layer = "h.2.mlp.fc_in", phase = forward} : tensor<8x32xf32>
    %addmm.16 = aten.addmm(%h.2.mlp.fc_in.bias, %view.44, %permute_28) {layer = "h.2.mlp.fc_in", phase = forward} : tensor<32x32xf32>
    %view.45 = aten.view(%addmm.16) {layer = "h.2.mlp.fc_in", phase = forward} : tensor<8x4x32xf32>
    %gelu.2 = aten.gelu(%view.45, approximate = "tanh") {layer = "h.2.mlp", phase = forward} : tensor<8x4x32xf32>
    %view.46 = aten.view(%gelu.2) {layer = "h.2.mlp.fc_out", phase = forward} : tensor<32x32xf32>
    %permute_29 = aten.permute(%h.2.mlp.fc_out.weight, dims = [1, 0]) {layer = "h.2.mlp.fc_out", phase = forward} : tensor<32x8xf32>
    %addmm.17 = aten.addmm(%h.2.mlp.fc_out.bias, %view.46, %permute_29) {layer = "h.2.mlp.fc_out", phase = forward} : tensor<32x8xf32>
    %view.47 = aten.view(%addmm.17) {layer = "h.2.mlp.fc_out", phase = forward} : tensor<8x4x8xf32>
    %add.6 = aten.add.Tensor(%add.5, %view.47) {layer = "h.2", phase = forward} : tensor<8x4x8xf32>
    %native_layer_norm.6, %native_layer_norm.6_1, %native_layer_norm.6_2 = aten.native_layer_norm(%add.6, %h.3.ln_1.weight, %h.3.ln_1.bias, eps = 1.0e-05) {layer = "h.3.ln_1", phase = forward} : tensor<8x4x8xf32>, tensor<8x4x1xf32>, tensor<8x4x1xf32>
    %view.48 = aten.view(%native_layer_norm.6) {layer = "h.3.attn.q", phase = forward} : tensor<32x8xf32>
    %permute_30 = aten.permute(%h.3.attn.q.weight, dims = [1, 0]) {layer = "h.3.attn.q", phase = forward} : tensor<8x8xf32>
    %addmm.18 = aten.addmm(%h.3.attn.q.bias, %view.48, %permute_30) {layer = "h.3.attn.q", phase = forward} : tensor<32x8xf32>
    %view.50 = aten.view(%addmm.18) {layer = "h.3.attn", phase = forward} : tensor<8x4x2x4xf32>
    %permute_31 = aten.permute(%view.50, dims = [0, 2, 1, 3]) {layer = "h.3.attn", phase = forward} : tensor<8x2x4x4xf32>
    %view.51 = aten.view(%native_layer_norm.6) {layer = "h.3.attn.k", phase = forward} : tensor<32x8xf32>
    %permute_32 = aten.permute(%h.3.attn.k.weight, dims = [1, 0]) {layer = "h.3.attn.k", phase = forward} : tensor<8x8xf32>
    %addmm.19 = aten.addmm(%h.3.attn.k.bias, %view.51, %permute_32) {layer = "h.3.attn.k", phase = forward} : tensor<32x8xf32>
    %view.53 = aten.view(%addmm.19) {layer = "h.3.attn", phase = forward} : tensor<8x4x2x4xf32>
    %permute_33 = aten.permute(%view.53, dims = [0, 2, 1, 3]) {layer = "h.3.attn", phase = forward} : tensor<8x2x4x4xf32>
    %view.54 = aten.view(%native_layer_norm.6) {layer = "h.3.attn.v", phase = forward} : tensor<32x8xf32>
    %permute_34 = aten.permute(%h.3.attn.v.weight, dims = [1, 0]) {layer = "h.3.attn.v", phase = forward} : tensor<8x8xf32>
    %addmm.20 = aten.addmm(%h.3.attn.v.bias, %view.54, %permute_34) {layer = "h.3.attn.v", phase = forward} : tensor<32x8xf32>
    %view.56 = aten.view(%addmm.20) {layer = "h.3.attn", phase = forward} : tensor<8x4x2x4xf32>
    %permute_35 = aten.permute(%view.56, dims = [0, 2, 1, 3]) {layer = "h.3.attn", phase = forward} : tensor<8x2x4x4xf32>
    %_scaled_dot_product_flash_attention_for_cpu.3, %_scaled_dot_product_flash_attention_for_cpu.3_1 = aten._scaled_dot_product_flash_attention_for_cpu(%permute_31, %permute_33, %permute_35, is_causal = true) {layer = "h.3.attn", phase = forward} : tensor<8x2x4x4xf32>, tensor<8x2x4xf32>
    %permute_36 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu.3, dims = [0, 2, 1, 3]) {layer = "h.3.attn", phase = forward} : tensor<8x4x2x4xf32>
    %view.58 = aten.view(%permute_36) {layer = "h.3.attn.proj", phase = forward} : tensor<32x8xf32>
    %permute_37 = aten.permute(%h.3.attn.proj.weight, dims = [1, 0]) {layer = "h.3.attn.proj", phase = forward} : tensor<8x8xf32>
    %addmm.21 = aten.addmm(%h.3.attn.proj.bias, %view.58, %permute_37) {layer = "h.3.attn.proj", phase = forward} : tensor<32x8xf32>
    %view.59 = aten.view(%addmm.21) {layer = "h.3.attn.proj", phase = forward} : tensor<8x4x8xf32>
    %add.7 = aten.add.Tensor(%add.6, %view.59) {layer = "h.3", phase = forward} : tensor<8x4x8xf32>
    %native_layer_norm.7, %native_layer_norm.7_1, %native_layer_norm.7_2 = aten.native_layer_norm(%add.7, %h.3.ln_2.weight, %h.3.ln_2.bias, eps = 1.0e-05) {layer = "h.3.ln_2", phase = forward} : tensor<8x4x8xf32>, tensor<8x4x1xf32>, tensor<8x4x1xf32>
    %view.60 = aten.view(%native_layer_norm.7) {layer = "h.3.mlp.fc_in", phase = forward} : tensor<32x8xf32>
    %permute_38 = aten.permute(%h.3.mlp.fc_in.weight, dims = [1, 0]) {layer = "h.3.mlp.fc_in", phase = forward} : tensor<8x32xf32>
    %addmm.22 = aten.addmm(%h.3.mlp.fc_in.bias, %view.60, %permute_38) {layer = "h.3.mlp.fc_in", phase = forward} : tensor<32x32xf32>
    %view.61 = aten.view(%addmm.22) {layer = "h.3.mlp.fc_in", phase = forward} : tensor<8x4x32xf32>
    %gelu.3 = aten.gelu(%view.61, approximate = "tanh") {layer = "h.3.mlp", phase = forward} : tensor<8x4x32xf32>
    %view.62 = aten.view(%gelu.3) {layer = "h.3.mlp.fc_out", phase = forward} : tensor<32x32xf32>
    %permute_39 = aten.permute(%h.3.mlp.fc_out.weight, dims = [1, 0]) {layer = "h.3.mlp.fc_out", phase = forward} : tensor<32x8xf32>
    %addmm.23 = aten.addmm(%h.3.mlp.fc_out.bias, %view.62, %permute_39) {layer = "h.3.mlp.fc_out", phase = forward} : tensor<32x8xf32>
    %view.63 = aten.view(%addmm.23) {layer = "h.3.mlp.fc_out", phase = forward} : tensor<8x4x8xf32>
    %add.8 = aten.add.Tensor(%add.7, %view.63) {layer = "h.3", phase = forward} : tensor<8x4x8xf32>
    %native_layer_norm.8, %native_layer_norm.8_1, %native_layer_norm.8_2 = aten.native_layer_norm(%add.8, %ln_f.weight, %ln_f.bias, eps = 1.0e-05) {layer = "ln_f", phase = forward} : tensor<8x4x8xf32>, tensor<8x4x1xf32>, tensor<8x4x1xf32>
    %permute_40 = aten.permute(%head.weight, dims = [1, 0]) {layer = "head", phase = forward} : tensor<8x16xf32>
    %view.64 = aten.view(%native_layer_norm.8) {layer = "head", phase = forward} : tensor<32x8xf32>
    %mm = aten.mm(%view.64, %permute_40) {layer = "head", phase = forward} : tensor<32x16xf32>
    %amax = aten.amax(%mm, dim = [1], keepdim = true) {layer = "", phase = forward} : tensor<32x1xf32>
    %sub = aten.sub.Tensor(%mm, %amax) {layer = "", phase = forward} : tensor<32x16xf32>
    %exp = aten.exp(%sub) {layer = "", phase = forward} : tensor<32x16xf32>
    %sum = aten.sum.dim_IntList(%exp, dim = [1], keepdim = true) {layer = "", phase = forward} : tensor<32x1xf32>
    %_log_softmax = aten.log(%sum) {layer = "", phase = forward} : tensor<32x1xf32>
    %sub_1 = aten.sub.Tensor(%sub, %_log_softmax) {layer = "", phase = forward} : tensor<32x16xf32>
    %view_1 = aten.view(%labels) {layer = "", phase = forward} : tensor<32x1xi64>
    %ne = aten.ne.Scalar(%view_1, other = -100) {layer = "", phase = forward} : tensor<32x1xi1>
    %full = aten.full(fill_value = 0) {layer = "", phase = forward} : tensor<i64>
    %where = aten.where.self(%ne, %view_1, %full) {layer = "", phase = forward} : tensor<32x1xi64>
    %gather = aten.gather(%sub_1, %where, dim = 1) {layer = "", phase = forward} : tensor<32x1xf32>
    %view_2 = aten.view(%labels) {layer = "", phase = forward} : tensor<32x1xi64>
    %eq = aten.eq.Scalar(%view_2, other = -100) {layer = "", phase = forward} : tensor<32x1xi1>
    %neg = aten.neg(%gather) {layer = "", phase = forward} : tensor<32x1xf32>
    %masked_fill = aten.masked_fill.Scalar(%neg, %eq, value = 0.0) {layer = "", phase = forward} : tensor<32x1xf32>
    %to_copy = aten._to_copy(%ne) {layer = "", phase = forward} : tensor<32x1xf32>
    %sum_1 = aten.sum.dim_IntList(%to_copy, dim = [0, 1]) {layer = "", phase = forward} : tensor<f32>
    %sum_2 = aten.sum.dim_IntList(%masked_fill, dim = [0, 1]) {layer = "", phase = forward} : tensor<f32>
    %div = aten.div.Tensor(%sum_2, %sum_1) {layer = "", phase = forward} : tensor<f32>
    %view_3 = aten.view(%labels) {layer = "", phase = forward} : tensor<32x1xi64>
    %ne_1 = aten.ne.Scalar(%view_3, other = -100) {layer = "", phase = forward} : tensor<32x1xi1>
    %full_1 = aten.full(fill_value = 0) {layer = "", phase = forward} : tensor<i64>
    %where_1 = aten.where.self(%ne_1, %view_3, %full_1) {layer = "", phase = forward} : tensor<32x1xi64>
    %div_1 = aten.div.Tensor(%tangent, %sum_1) {layer = "", phase = backward} : tensor<f32>
    %full_2 = aten.full(fill_value = 0.0) {layer = "", phase = forward} : tensor<f32>
    %neg_1 = aten.neg(%div_1) {layer = "", phase = backward} : tensor<f32>
    %where_2 = aten.where.self(%ne_1, %neg_1, %full_2) {layer = "", phase = backward} : tensor<32x1xf32>
    %exp_1 = aten.exp(%sub_1) {layer = "", phase = forward} : tensor<32x16xf32>
    %neg_2 = aten.neg(%where_2) {layer = "", phase = backward} : tensor<32x1xf32>
    %mul = aten.mul.Tensor(%exp_1, %neg_2) {layer = "", phase = backward} : tensor<32x16xf32>
    %scatter_add = aten.scatter_add(%mul, %where_1, %where_2, dim = 1) {layer = "", phase = backward} : tensor<32x16xf32>
    %permute_41 = aten.permute(%scatter_add, dims = [1, 0]) {layer = "head", phase = backward} : tensor<16x32xf32>
    %mm.1 = aten.mm(%permute_41, %view.64) {layer = "head", phase = backward} : tensor<16x8xf32>
    %mm.2 = aten.mm(%scatter_add, %head.weight) {layer = "head", phase = backward} : tensor<32x8xf32>
    %view.69 = aten.view(%mm.2) {layer = "head", phase = backward} : tensor<8x4x8xf32>
    %native_layer_norm_backward, %native_layer_norm_backward_1, %native_layer_norm_backward_2 = aten.native_layer_norm_backward(%view.69, %add.8, %native_layer_norm.8_1, %native_layer_norm.8_2, %ln_f.weight, %ln_f.bias, output_mask = [true, true, true]) {layer = "ln_f", phase = backward} : tensor<8x4x8xf32>, tensor<8xf32>, tensor<8xf32>
    %view.70 = aten.view(%native_layer_norm_backward) {layer = "h.3.mlp.fc_out", phase = backward} : tensor<32x8xf32>
    %mm.3 = aten.mm(%view.70, %h.3.mlp.fc_out.weight) {layer = "h.3.mlp.fc_out", phase = backward} : tensor<32x32xf32>
    %permute_42 = aten.permute(%view.70, dims = [1, 0]) {layer = "h.3.mlp.fc_out", phase = backward} : tensor<8x32xf32>
    %mm.4 = aten.mm(%permute_42, %view.62) {layer = "h.3.mlp.fc_out", phase = backward} : tensor<8x32xf32>
    %sum.1 = aten.sum.dim_IntList(%view.70, dim = [0], keepdim = true) {layer = "h.3.mlp.fc_out", phase = backward} : tensor<1x8xf32>
    %view.71 = aten.view(%sum.1) {layer = "h.3.mlp.fc_out", phase = backward} : tensor<8xf32>
    %view.72 = aten.view(%mm.3) {layer = "h.3.mlp.fc_out", phase = backward} : tensor<8x4x32xf32>
    %gelu_backward = aten.gelu_backward(%view.72, %view.61, approximate = "tanh") {layer = "h.3.mlp", phase = backward} : tensor<8x4x32xf32>
    %view.73 = aten.view(%gelu_backward) {layer = "h.3.mlp.fc_in", phase = backward} : tensor<32x32xf32>
    %mm.5 = aten.mm(%view.73, %h.3.mlp.fc_in.weight) {layer = "h.3.mlp.fc_in", phase = backward} : tensor<32x8xf32>
    %permute_43 = aten.permute(%view.73, dims = [1, 0]) {layer = "h.3.mlp.fc_in", phase = backward} : tensor<32x32xf32>
    %mm.6 = aten.mm(%permute_43, %view.60) {layer = "h.3.mlp.fc_in", phase = backward} : tensor<32x8xf32>
    %sum.2 = aten.sum.dim_IntList(%view.73, dim = [0], keepdim = true) {layer = "h.3.mlp.fc_in", phase = backward} : tensor<1x32xf32>
    %view.74 = aten.view(%sum.2) {layer = "h.3.mlp.fc_in", phase = backward} : tensor<32xf32>
    %view.75 = aten.view(%mm.5) {layer = "h.3.mlp.fc_in", phase = backward} : tensor<8x4x8xf32>
    %native_layer_norm_backward.1, %native_layer_norm_backward.1_1, %native_layer_norm_backward.1_2 = aten.native_layer_norm_backward(%view.75, %add.7, %native_layer_norm.7_1, %native_layer_norm.7_2, %h.3.ln_2.weight, %h.3.ln_2.bias, output_mask = [true, true, true]) {layer = "h.3.ln_2", phase = backward} : tensor<8x4x8xf32>, tensor<8xf32>, tensor<8xf32>
    %add.9 = aten.add.Tensor(%native_layer_norm_backward, %native_layer_norm_backward.1) {layer = "", phase = backward} : tensor<8x4x8xf32>
    %view.76 = aten.view(%add.9) {layer = "h.3.attn.proj", phase = backward} : tensor<32x8xf32>
    %mm.7 = aten.mm(%view.76, %h.3.attn.proj.weight) {layer = "h.3.attn.proj", phase = backward} : tensor<32x8xf32>
    %permute_44 = aten.permute(%view.76, dims = [1, 0]) {layer = "h.3.attn.proj", phase = backward} : tensor<8x32xf32>
    %mm.8 = aten.mm(%permute_44, %view.58) {layer = "h.3.attn.proj", phase = backward} : tensor<8x8xf32>
    %sum.3 = aten.sum.dim_IntList(%view.76, dim = [0], keepdim = true) {layer = "h.3.attn.proj", phase = backward} : tensor<1x8xf32>
    %view.77 = aten.view(%sum.3) {layer = "h.3.attn.proj", phase = backward} : tensor<8xf32>
    %view.79 = aten.view(%mm.7) {layer = "h.3.attn", phase = backward} : tensor<8x4x2x4xf32>
    %permute_45 = aten.permute(%view.79, dims = [0, 2, 1, 3]) {layer = "h.3.attn", phase = backward} : tensor<8x2x4x4xf32>
    %_scaled_dot_product_flash_attention_for_cpu_backward, %_scaled_dot_product_flash_attention_for_cpu_backward_1, %_scaled_dot_product_flash_attention_for_cpu_backward_2 = aten._scaled_dot_product_flash_attention_for_cpu_backward(%permute_45, %permute_31, %permute_33, %permute_35, %_scaled_dot_product_flash_attention_for_cpu.3, %_scaled_dot_product_flash_attention_for_cpu.3_1, dropout_p = 0.0, is_causal = true) {layer = "h.3.attn", phase = backward} : tensor<8x2x4x4xf32>, tensor<8x2x4x4xf32>, tensor<8x2x4x4xf32>
    %permute_46 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu_backward_2, dims = [0, 2, 1, 3]) {layer = "h.3.attn", phase = backward} : tensor<8x4x2x4xf32>
    %view.81 = aten.view(%permute_46) {layer = "h.3.attn.v", phase = backward} : tensor<32x8xf32>
    %mm.9 = aten.mm(%view.81, %h.3.attn.v.weight) {layer = "h.3.attn.v", phase = backward} : tensor<32x8xf32>
    %permute_47 = aten.permute(%view.81, dims = [1, 0]) {layer = "h.3.attn.v", phase = backward} : tensor<8x32xf32>
    %mm.10 = aten.mm(%permute_47, %view.54) {layer = "h.3.attn.v", phase = backward} : tensor<8x8xf32>
    %sum.4 = aten.sum.dim_IntList(%view.81, dim = [0], keepdim = true) {layer = "h.3.attn.v", phase = backward} : tensor<1x8xf32>
    %view.82 = aten.view(%sum.4) {layer = "h.3.attn.v", phase = backward} : tensor<8xf32>
    %view.83 = aten.view(%mm.9) {layer = "h.3.attn.v", phase = backward} : tensor<8x4x8xf32>
    %permute_48 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu_backward_1, dims = [0, 2, 1, 3]) {layer = "h.3.attn", phase = backward} : tensor<8x4x2x4xf32>
    %view.85 = aten.view(%permute_48) {layer = "h.3.attn.k", phase = backward} : tensor<32x8xf32>
    %mm.11 = aten.mm(%view.85, %h.3.attn.k.weight) {layer = "h.3.attn.k", phase = backward} : tensor<32x8xf32>
    %permute_49 = aten.permute(%view.85, dims = [1, 0]) {layer = "h.3.attn.k", phase = backward} : tensor<8x32xf32>
    %mm.12 = aten.mm(%permute_49, %view.51) {layer = "h.3.attn.k", phase = backward} : tensor<8x8xf32>
    %sum.5 = aten.sum.dim_IntList(%view.85, dim = [0], keepdim = true) {layer = "h.3.attn.k", phase = backward} : tensor<1x8xf32>
    %view.86 = aten.view(%sum.5) {layer = "h.3.attn.k", phase = backward} : tensor<8xf32>
    %view.87 = aten.view(%mm.11) {layer = "h.3.attn.k", phase = backward} : tensor<8x4x8xf32>
    %add.10 = aten.add.Tensor(%view.83, %view.87) {layer = "h.3.attn", phase = backward} : tensor<8x4x8xf32>
    %permute_50 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu_backward, dims = [0, 2, 1, 3]) {layer = "h.3.attn", phase = backward} : tensor<8x4x2x4xf32>
    %view.89 = aten.view(%permute_50) {layer = "h.3.attn.q", phase = backward} : tensor<32x8xf32>
    %mm.13 = aten.mm(%view.89, %h.3.attn.q.weight) {layer = "h.3.attn.q", phase = backward} : tensor<32x8xf32>
    %permute_51 = aten.permute(%view.89, dims = [1, 0]) {layer = "h.3.attn.q", phase = backward} : tensor<8x32xf32>
    %mm.14 = aten.mm(%permute_51, %view.48) {layer = "h.3.attn.q", phase = backward} : tensor<8x8xf32>
    %sum.6 = aten.sum.dim_IntList(%view.89, dim = [0], keepdim = true) {layer = "h.3.attn.q", phase = backward} : tensor<1x8xf32>
    %view.90 = aten.view(%sum.6) {layer = "h.3.attn.q", phase = backward} : tensor<8xf32>
    %view.91 = aten.view(%mm.13) {layer = "h.3.attn.q", phase = backward} : tensor<8x4x8xf32>
    %add.11 = aten.add.Tensor(%add.10, %view.91) {layer = "h.3.attn", phase = backward} : tensor<8x4x8xf32>
    %native_layer_norm_backward.2, %native_layer_norm_backward.2_1, %native_layer_norm_backward.2_2 = aten.native_layer_norm_backward(%add.11, %add.6, %native_layer_norm.6_1, %native_layer_norm.6_2, %h.3.ln_1.weight, %h.3.ln_1.bias, output_mask = [true, true, true]) {layer = "h.3.ln_1", phase = backward} : tensor<8x4x8xf32>, tensor<8xf32>, tensor<8xf32>
    %add.12 = aten.add.Tensor(%add.9, %native_layer_norm_backward.2) {layer = "", phase = backward} : tensor<8x4x8xf32>
    %view.92 = aten.view(%add.12) {layer = "h.2.mlp.fc_out", phase = backward} : tensor<32x8xf32>
    %mm.15 = aten.mm(%view.92, %h.2.mlp.fc_out.weight) {layer = "h.2.mlp.fc_out", phase = backward} : tensor<32x32xf32>
    %permute_52 = aten.permute(%view.92, dims = [1, 0]) {layer = "h.2.mlp.fc_out", phase = backward} : tensor<8x32xf32>
    %mm.16 = aten.mm(%permute_52, %view.46) {layer = "h.2.mlp.fc_out", phase = backward} : tensor<8x32xf32>
    %sum.7 = aten.sum.dim_IntList(%view.92, dim = [0], keepdim = true) {layer = "h.2.mlp.fc_out", phase = backward} : tensor<1x8xf32>
    %view.93 = aten.view(%sum.7) {layer = "h.2.mlp.fc_out", phase = backward} : tensor<8xf32>
    %view.94 = aten.view(%mm.15) {layer = "h.2.mlp.fc_out", phase = backward} : tensor<8x4x32xf32>
    %gelu_backward.1 = aten.gelu_backward(%view.94, %view.45, approximate = "tanh") {layer = "h.2.mlp", phase = backward} : tensor<8x4x32xf32>
    %view.95 = aten.view(%gelu_backward.1) {layer = "h.2.mlp.fc_in", phase = backward} : tensor<32x32xf32>
    %mm.17 = aten.mm(%view.95, %h.2.mlp.fc_in.weight) {layer = "h.2.mlp.fc_in", phase = backward} : tensor<32x8xf32>
    %permute_53 = aten.permute(%view.95, dims = [1, 0]) {layer = "h.2.mlp.fc_in", phase = backward} : tensor<32x32xf32>
    %mm.18 = aten.mm(%permute_53, %view.44) {layer = "h.2.mlp.fc_in", phase = backward} : tensor<32x8xf32>
    %sum.8 = aten.sum.dim_IntList(%view.95, dim = [0], keepdim = true) {layer = "h.2.mlp.fc_in", phase = backward} : tensor<1x32xf32>
    %view.96 = aten.view(%sum.8) {layer = "h.2.mlp.fc_in", phase = backward} : tensor<32xf32>
    %view.97 = aten.view(%mm.17) {layer = "h.2.mlp.fc_in", phase = backward} : tensor<8x4x8xf32>
    %native_layer_norm_backward.3, %native_layer_norm_backward.3_1, %native_layer_norm_backward.3_2 = aten.native_layer_norm_backward(%view.97, %add.5, %native_layer_norm.5_1, %native_layer_norm.5_2, %h.2.ln_2.weight, %h.2.ln_2.bias, output_mask = [true, true, true]) {layer = "h.2.ln_2", phase = backward} : tensor<8x4x8xf32>, tensor<8xf32>, tensor<8xf32>
    %add.13 = aten.add.Tensor(%add.12, %native_layer_norm_backward.3) {layer = "", phase = backward} : tensor<8x4x8xf32>
    %view.98 = aten.view(%add.13) {layer = "h.2.attn.proj", phase = backward} : tensor<32x8xf32>
    %mm.19 = aten.mm(%view.98, %h.2.attn.proj.weight) {layer = "h.2.attn.proj", phase = backward} : tensor<32x8xf32>
    %permute_54 = aten.permute(%view.98, dims = [1, 0]) {layer = "h.2.attn.proj", phase = backward} : tensor<8x32xf32>
    %mm.20 = aten.mm(%permute_54, %view.42) {layer = "h.2.attn.proj", phase = backward} : tensor<8x8xf32>
    %sum.9 = aten.sum.dim_IntList(%view.98, dim = [0], keepdim = true) {layer = "h.2.attn.proj", phase = backward} : tensor<1x8xf32>
    %view.99 = aten.view(%sum.9) {layer = "h.2.attn.proj", phase = backward} : tensor<8xf32>
    %view.101 = aten.view(%mm.19) {layer = "h.2.attn", phase = backward} : tensor<8x4x2x4xf32>
    %permute_55 = aten.permute(%view.101, dims = [0, 2, 1, 3]) {layer = "h.2.attn", phase = backward} : tensor<8x2x4x4xf32>
    %_scaled_dot_product_flash_attention_for_cpu_backward.1, %_scaled_dot_product_flash_attention_for_cpu_backward.1_1, %_scaled_dot_product_flash_attention_for_cpu_backward.1_2 = aten._scaled_dot_product_flash_attention_for_cpu_backward(%permute_55, %permute_21, %permute_23, %permute_25, %_scaled_dot_product_flash_attention_for_cpu.2, %_scaled_dot_product_flash_attention_for_cpu.2_1, dropout_p = 0.0, is_causal = true) {layer = "h.2.attn", phase = backward} : tensor<8x2x4x4xf32>, tensor<8x2x4x4xf32>, tensor<8x2x4x4xf32>
    %permute_56 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu_backward.1_2, dims = [0, 2, 1, 3]) {layer = "h.2.attn", phase = backward} : tensor<8x4x2x4xf32>
    %view.103 = aten.view(%permute_56) {layer = "h.2.attn.v", phase = backward} : tensor<32x8xf32>
    %mm.21 = aten.mm(%view.103, %h.2.attn.v.weight) {layer = "h.2.attn.v", phase = backward} : tensor<32x8xf32>
    %permute_57 = aten.permute(%view.103, dims = [1, 0]) {layer = "h.2.attn.v", phase = backward} : tensor<8x32xf32>
    %mm.22 = aten.mm(%permute_57, %view.38) {layer = "h.2.attn.v", phase = backward} : tensor<8x8xf32>
    %sum.10 = aten.sum.dim_IntList(%view.103, dim = [0], keepdim = true) {layer = "h.2.attn.v", phase = backward} : tensor<1x8xf32>
    %view.104 = aten.view(%sum.10) {layer = "h.2.attn.v", phase = backward} : tensor<8xf32>
    %view.105 = aten.view(%mm.21) {layer = "h.2.attn.v", phase = backward} : tensor<8x4x8xf32>
    %permute_58 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu_backward.1_1, dims = [0, 2, 1, 3]) {layer = "h.2.attn", phase = backward} : tensor<8x4x2x4xf32>
    %view.107 = aten.view(%permute_58) {layer = "h.2.attn.k", phase = backward} : tensor<32x8xf32>
    %mm.23 = aten.mm(%view.107, %h.2.attn.k.weight) {layer = "h.2.attn.k", phase = backward} : tensor<32x8xf32>
    %permute_59 = aten.permute(%view.107, dims = [1, 0]) {layer = "h.2.attn.k", phase = backward} : tensor<8x32xf32>
    %mm.24 = aten.mm(%permute_59, %view.35) {layer = "h.2.attn.k", phase = backward} : tensor<8x8xf32>
    %sum.11 = aten.sum.dim_IntList(%view.107, dim = [0], keepdim = true) {layer = "h.2.attn.k", phase = backward} : tensor<1x8xf32>
    %view.108 = aten.view(%sum.11) {layer = "h.2.attn.k", phase = backward} : tensor<8xf32>
    %view.109 = aten.view(%mm.23) {layer = "h.2.attn.k", phase = backward} : tensor<8x4x8xf32>
    %add.14 = aten.add.Tensor(%view.105, %view.109) {layer = "h.2.attn", phase = backward} : tensor<8x4x8xf32>
    %permute_60 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu_backward.1, dims = [0, 2, 1, 3]) {layer = "h.2.attn", phase = backward} : tensor<8x4x2x4xf32>
    %view.111 = aten.view(%permute_60) {layer = "h.2.attn.q", phase = backward} : tensor<32x8xf32>
    %mm.25 = aten.mm(%view.111, %h.2.attn.q.weight) {layer = "h.2.attn.q", phase = backward} : tensor<32x8xf32>
    %permute_61 = aten.permute(%view.111, dims = [1, 0]) {layer = "h.2.attn.q", phase = backward} : tensor<8x32xf32>
    %mm.26 = aten.mm(%permute_61, %view.32) {layer = "h.2.attn.q", phase = backward} : tensor<8x8xf32>
    %sum.12 = aten.sum.dim_IntList(%view.111, dim = [0], keepdim = true) {layer = "h.2.attn.q", phase = backward} : tensor<1x8xf32>
    %view.112 = aten.view(%sum.12) {layer = "h.2.attn.q", phase = backward} : tensor<8xf32>
    %view.113 = aten.view(%mm.25) {layer = "h.2.attn.q", phase = backward} : tensor<8x4x8xf32>
    %add.15 = aten.add.Tensor(%add.14, %view.113) {layer = "h.2.attn", phase = backward} : tensor<8x4x8xf32>
    %native_layer_norm_backward.4, %native_layer_norm_backward.4_1, %native_layer_norm_backward.4_2 = aten.native_layer_norm_backward(%add.15, %add.4, %native_layer_norm.4_1, %native_layer_norm.4_2, %h.2.ln_1.weight, %h.2.ln_1.bias, output_mask = [true, true, true]) {layer = "h.2.ln_1", phase = backward} : tensor<8x4x8xf32>, tensor<8xf32>, tensor<8xf32>
    %add.16 = aten.add.Tensor(%add.13, %native_layer_norm_backward.4) {layer = "", phase = backward} : tensor<8x4x8xf32>
    %view.114 = aten.view(%add.16) {layer = "h.1.mlp.fc_out", phase = backward} : tensor<32x8xf32>
    %mm.27 = aten.mm(%view.114, %h.1.mlp.fc_out.weight) {layer = "h.1.mlp.fc_out", phase = backward} : tensor<32x32xf32>
    %permute_62 = aten.permute(%view.114, dims = [1, 0]) {layer = "h.1.mlp.fc_out", phase = backward} : tensor<8x32xf32>
    %mm.28 = aten.mm(%permute_62, %view.30) {layer = "h.1.mlp.fc_out", phase = backward} : tensor<8x32xf32>
    %sum.13 = aten.sum.dim_IntList(%view.114, dim = [0], keepdim = true) {layer = "h.1.mlp.fc_out", phase = backward} : tensor<1x8xf32>
    %view.115 = aten.view(%sum.13) {layer = "h.1.mlp.fc_out", phase = backward} : tensor<8xf32>
    %view.116 = aten.view(%mm.27) {layer = "h.1.mlp.fc_out", phase = backward} : tensor<8x4x32xf32>
    %gelu_backward.2 = aten.gelu_backward(%view.116, %view.29, approximate = "tanh") {layer = "h.1.mlp", phase = backward} : tensor<8x4x32xf32>
    %view.117 = aten.view(%gelu_backward.2) {layer = "h.1.mlp.fc_in", phase = backward} : tensor<32x32xf32>
    %mm.29 = aten.mm(%view.117, %h.1.mlp.fc_in.weight) {layer = "h.1.mlp.fc_in", phase = backward} : tensor<32x8xf32>
    %permute_63 = aten.permute(%view.117, dims = [1, 0]) {layer = "h.1.mlp.fc_in", phase = backward} : tensor<32x32xf32>
    %mm.30 = aten.mm(%permute_63, %view.28) {layer = "h.1.mlp.fc_in", phase = backward} : tensor<32x8xf32>
    %sum.14 = aten.sum.dim_IntList(%view.117, dim = [0], keepdim = true) {layer = "h.1.mlp.fc_in", phase = backward} : tensor<1x32xf32>
    %view.118 = aten.view(%sum.14) {layer = "h.1.mlp.fc_in", phase = backward} : tensor<32xf32>
    %view.119 = aten.view(%mm.29) {layer = "h.1.mlp.fc_in", phase = backward} : tensor<8x4x8xf32>
    %native_layer_norm_backward.5, %native_layer_norm_backward.5_1, %native_layer_norm_backward.5_2 = aten.native_layer_norm_backward(%view.119, %add.3, %native_layer_norm.3_1, %native_layer_norm.3_2, %h.1.ln_2.weight, %h.1.ln_2.bias, output_mask = [true, true, true]) {layer = "h.1.ln_2", phase = backward} : tensor<8x4x8xf32>, tensor<8xf32>, tensor<8xf32>
    %add.17 = aten.add.Tensor(%add.16, %native_layer_norm_backward.5) {layer = "", phase = backward} : tensor<8x4x8xf32>
    %view.120 = aten.view(%add.17) {layer = "h.1.attn.proj", phase = backward} : tensor<32x8xf32>
    %mm.31 = aten.mm(%view.120, %h.1.attn.proj.weight) {layer = "h.1.attn.proj", phase = backward} : tensor<32x8xf32>
    %permute_64 = aten.permute(%view.120, dims = [1, 0]) {layer = "h.1.attn.proj", phase = backward} : tensor<8x32xf32>
    %mm.32 = aten.mm(%permute_64, %view.26) {layer = "h.1.attn.proj", phase = backward} : tensor<8x8xf32>
    %sum.15 = aten.sum.dim_IntList(%view.120, dim = [0], keepdim = true) {layer = "h.1.attn.proj", phase = backward} : tensor<1x8xf32>
    %view.121 = aten.view(%sum.15) {layer = "h.1.attn.proj", phase = backward} : tensor<8xf32>
    %view.123 = aten.view(%mm.31) {layer = "h.1.attn", phase = backward} : tensor<8x4x2x4xf32>
    %permute_65 = aten.permute(%view.123, dims = [0, 2, 1, 3]) {layer = "h.1.attn", phase = backward} : tensor<8x2x4x4xf32>
    %_scaled_dot_product_flash_attention_for_cpu_backward.2, %_scaled_dot_product_flash_attention_for_cpu_backward.2_1, %_scaled_dot_product_flash_attention_for_cpu_backward.2_2 = aten._scaled_dot_product_flash_attention_for_cpu_backward(%permute_65, %permute_11, %permute_13, %permute_15, %_scaled_dot_product_flash_attention_for_cpu.1, %_scaled_dot_product_flash_attention_for_cpu.1_1, dropout_p = 0.0, is_causal = true) {layer = "h.1.attn", phase = backward} : tensor<8x2x4x4xf32>, tensor<8x2x4x4xf32>, tensor<8x2x4x4xf32>
    %permute_66 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu_backward.2_2, dims = [0, 2, 1, 3]) {layer = "h.1.attn", phase = backward} : tensor<8x4x2x4xf32>
    %view.125 = aten.view(%permute_66) {layer = "h.1.attn.v", phase = backward} : tensor<32x8xf32>
    %mm.33 = aten.mm(%view.125, %h.1.attn.v.weight) {layer = "h.1.attn.v", phase = backward} : tensor<32x8xf32>
    %permute_67 = aten.permute(%view.125, dims = [1, 0]) {layer = "h.1.attn.v", phase = backward} : tensor<8x32xf32>
    %mm.34 = aten.mm(%permute_67, %view.22) {layer = "h.1.attn.v", phase = backward} : tensor<8x8xf32>
    %sum.16 = aten.sum.dim_IntList(%view.125, dim = [0], keepdim = true) {layer = "h.1.attn.v", phase = backward} : tensor<1x8xf32>
    %view.126 = aten.view(%sum.16) {layer = "h.1.attn.v", phase = backward} : tensor<8xf32>
    %view.127 = aten.view(%mm.33) {layer = "h.1.attn.v", phase = backward} : tensor<8x4x8xf32>
    %permute_68 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu_backward.2_1, dims = [0, 2, 1, 3]) {layer = "h.1.attn", phase = backward} : tensor<8x4x2x4xf32>
    %view.129 = aten.view(%permute_68) {layer = "h.1.attn.k", phase = backward} : tensor<32x8xf32>
    %mm.35 = aten.mm(%view.129, %h.1.attn.k.weight) {layer = "h.1.attn.k", phase = backward} : tensor<32x8xf32>
    %permute_69 = aten.permute(%view.129, dims = [1, 0]) {layer = "h.1.attn.k", phase = backward} : tensor<8x32xf32>
    %mm.36 = aten.mm(%permute_69, %view.19) {layer = "h.1.attn.k", phase = backward} : tensor<8x8xf32>
    %sum.17 = aten.sum.dim_IntList(%view.129, dim = [0], keepdim = true) {layer = "h.1.attn.k", phase = backward} : tensor<1x8xf32>
    %view.130 = aten.view(%sum.17) {layer = "h.1.attn.k", phase = backward} : tensor<8xf32>
    %view.131 = aten.view(%mm.35) {layer = "h.1.attn.k", phase = backward} : tensor<8x4x8xf32>
    %add.18 = aten.add.Tensor(%view.127, %view.131) {layer = "h.1.attn", phase = backward} : tensor<8x4x8xf32>
    %permute_70 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu_backward.2, dims = [0, 2, 1, 3]) {layer = "h.1.attn", phase = backward} : tensor<8x4x2x4xf32>
    %view.133 = aten.view(%permute_70) {layer = "h.1.attn.q", phase = backward} : tensor<32x8xf32>
    %mm.37 = aten.mm(%view.133, %h.1.attn.q.weight) {layer = "h.1.attn.q", phase = backward} : tensor<32x8xf32>
    %permute_71 = aten.permute(%view.133, dims = [1, 0]) {layer = "h.1.attn.q", phase = backward} : tensor<8x32xf32>
    %mm.38 = aten.mm(%permute_71, %view.16) {layer = "h.1.attn.q", phase = backward} : tensor<8x8xf32>
    %sum.18 = aten.sum.dim_IntList(%view.133, dim = [0], keepdim = true) {layer = "h.1.attn.q", phase = backward} : tensor<1x8xf32>
    %view.134 = aten.view(%sum.18) {layer = "h.1.attn.q", phase = backward} : tensor<8xf32>
    %view.135 = aten.view(%mm.37) {layer = "h.1.attn.q", phase = backward} : tensor<8x4x8xf32>
    %add.19 = aten.add.Tensor(%add.18, %view.135) {layer = "h.1.attn", phase = backward} : tensor<8x4x8xf32>
    %native_layer_norm_backward.6, %native_layer_norm_backward.6_1, %native_layer_norm_backward.6_2 = aten.native_layer_norm_backward(%add.19, %add.2, %native_layer_norm.2_1, %native_layer_norm.2_2, %h.1.ln_1.weight, %h.1.ln_1.bias, output_mask = [true, true, true]) {layer = "h.1.ln_1", phase = backward} : tensor<8x4x8xf32>, tensor<8xf32>, tensor<8xf32>
    %add.20 = aten.add.Tensor(%add.17, %native_layer_norm_backward.6) {layer = "", phase = backward} : tensor<8x4x8xf32>
    %view.136 = aten.view(%add.20) {layer = "h.0.mlp.fc_out", phase = backward} : tensor<32x8xf32>
    %mm.39 = aten.mm(%view.136, %h.0.mlp.fc_out.weight) {layer = "h.0.mlp.fc_out", phase = backward} : tensor<32x32xf32>
    %permute_72 = aten.permute(%view.136, dims = [1, 0]) {layer = "h.0.mlp.fc_out", phase = backward} : tensor<8x32xf32>
    %mm.40 = aten.mm(%permute_72, %view.14) {layer = "h.0.mlp.fc_out", phase = backward} : tensor<8x32xf32>
    %sum.19 = aten.sum.dim_IntList(%view.136, dim = [0], keepdim = true) {layer = "h.0.mlp.fc_out", phase = backward} : tensor<1x8xf32>
    %view.137 = aten.view(%sum.19) {layer = "h.0.mlp.fc_out", phase = backward} : tensor<8xf32>
    %view.138 = aten.view(%mm.39) {layer = "h.0.mlp.fc_out", phase = backward} : tensor<8x4x32xf32>
    %gelu_backward.3 = aten.gelu_backward(%view.138, %view.13, approximate = "tanh") {layer = "h.0.mlp", phase = backward} : tensor<8x4x32xf32>
    %view.139 = aten.view(%gelu_backward.3) {layer = "h.0.mlp.fc_in", phase = backward} : tensor<32x32xf32>
    %mm.41 = aten.mm(%view.139, %h.0.mlp.fc_in.weight) {layer = "h.0.mlp.fc_in", phase = backward} : tensor<32x8xf32>
    %permute_73 = aten.permute(%view.139, dims = [1, 0]) {layer = "h.0.mlp.fc_in", phase = backward} : tensor<32x32xf32>
    %mm.42 = aten.mm(%permute_73, %view.12) {layer = "h.0.mlp.fc_in", phase = backward} : tensor<32x8xf32>
    %sum.20 = aten.sum.dim_IntList(%view.139, dim = [0], keepdim = true) {layer = "h.0.mlp.fc_in", phase = backward} : tensor<1x32xf32>
    %view.140 = aten.view(%sum.20) {layer = "h.0.mlp.fc_in", phase = backward} : tensor<32xf32>
    %view.141 = aten.view(%mm.41) {layer = "h.0.mlp.fc_in", phase = backward} : tensor<8x4x8xf32>
    %native_layer_norm_backward.7, %native_layer_norm_backward.7_1, %native_layer_norm_backward.7_2 = aten.native_layer_norm_backward(%view.141, %add.1, %native_layer_norm.1_1, %native_layer_norm.1_2, %h.0.ln_2.weight, %h.0.ln_2.bias, output_mask = [true, true, true]) {layer = "h.0.ln_2", phase = backward} : tensor<8x4x8xf32>, tensor<8xf32>, tensor<8xf32>
    %add.21 = aten.add.Tensor(%add.20, %native_layer_norm_backward.7) {layer = "", phase = backward} : tensor<8x4x8xf32>
    %view.142 = aten.view(%add.21) {layer = "h.0.attn.proj", phase = backward} : tensor<32x8xf32>
    %mm.43 = aten.mm(%view.142, %h.0.attn.proj.weight) {layer = "h.0.attn.proj", phase = backward} : tensor<32x8xf32>
    %permute_74 = aten.permute(%view.142, dims = [1, 0]) {layer = "h.0.attn.proj", phase = backward} : tensor<8x32xf32>
    %mm.44 = aten.mm(%permute_74, %view.10) {layer = "h.0.attn.proj", phase = backward} : tensor<8x8xf32>
    %sum.21 = aten.sum.dim_IntList(%view.142, dim = [0], keepdim = true) {layer = "h.0.attn.proj", phase = backward} : tensor<1x8xf32>
    %view.143 = aten.view(%sum.21) {layer = "h.0.attn.proj", phase = backward} : tensor<8xf32>
    %view.145 = aten.view(%mm.43) {layer = "h.0.attn", phase = backward} : tensor<8x4x2x4xf32>
    %permute_75 = aten.permute(%view.145, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = backward} : tensor<8x2x4x4xf32>
    %_scaled_dot_product_flash_attention_for_cpu_backward.3, %_scaled_dot_product_flash_attention_for_cpu_backward.3_1, %_scaled_dot_product_flash_attention_for_cpu_backward.3_2 = aten._scaled_dot_product_flash_attention_for_cpu_backward(%permute_75, %permute_1, %permute_3, %permute_5, %_scaled_dot_product_flash_attention_for_cpu, %_scaled_dot_product_flash_attention_for_cpu_1, dropout_p = 0.0, is_causal = true) {layer = "h.0.attn", phase = backward} : tensor<8x2x4x4xf32>, tensor<8x2x4x4xf32>, tensor<8x2x4x4xf32>
    %permute_76 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu_backward.3_2, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = backward} : tensor<8x4x2x4xf32>
    %view.147 = aten.view(%permute_76) {layer = "h.0.attn.v", phase = backward} : tensor<32x8xf32>
    %mm.45 = aten.mm(%view.147, %h.0.attn.v.weight) {layer = "h.0.attn.v", phase = backward} : tensor<32x8xf32>
    %permute_77 = aten.permute(%view.147, dims = [1, 0]) {layer = "h.0.attn.v", phase = backward} : tensor<8x32xf32>
    %mm.46 = aten.mm(%permute_77, %view.6) {layer = "h.0.attn.v", phase = backward} : tensor<8x8xf32>
    %sum.22 = aten.sum.dim_IntList(%view.147, dim = [0], keepdim = true) {layer = "h.0.attn.v", phase = backward} : tensor<1x8xf32>
    %view.148 = aten.view(%sum.22) {layer = "h.0.attn.v", phase = backward} : tensor<8xf32>
    %view.149 = aten.view(%mm.45) {layer = "h.0.attn.v", phase = backward} : tensor<8x4x8xf32>
    %permute_78 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu_backward.3_1, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = backward} : tensor<8x4x2x4xf32>
    %view.151 = aten.view(%permute_78) {layer = "h.0.attn.k", phase = backward} : tensor<32x8xf32>
    %mm.47 = aten.mm(%view.151, %h.0.attn.k.weight) {layer = "h.0.attn.k", phase = backward} : tensor<32x8xf32>
    %permute_79 = aten.permute(%view.151, dims = [1, 0]) {layer = "h.0.attn.k", phase = backward} : tensor<8x32xf32>
    %mm.48 = aten.mm(%permute_79, %view.3) {layer = "h.0.attn.k", phase = backward} : tensor<8x8xf32>
    %sum.23 = aten.sum.dim_IntList(%view.151, dim = [0], keepdim = true) {layer = "h.0.attn.k", phase = backward} : tensor<1x8xf32>
    %view.152 = aten.view(%sum.23) {layer = "h.0.attn.k", phase = backward} : tensor<8xf32>
    %view.153 = aten.view(%mm.47) {layer = "h.0.attn.k", phase = backward} : tensor<8x4x8xf32>
    %add.22 = aten.add.Tensor(%view.149, %view.153) {layer = "h.0.attn", phase = backward} : tensor<8x4x8xf32>
    %permute_80 = aten.permute(%_scaled_dot_product_flash_attention_for_cpu_backward.3, dims = [0, 2, 1, 3]) {layer = "h.0.attn", phase = backward} : tensor<8x4x2x4xf32>
    %view.155 = aten.view(%permute_80) {layer = "h.0.attn.q", phase = backward} : tensor<32x8xf32>
    %mm.49 = aten.mm(%view.155, %h.0.attn.q.weight) {layer = "h.0.attn.q", phase = backward} : tensor<32x8xf32>
    %permute_81 = aten.permute(%view.155, dims = [1, 0]) {layer = "h.0.attn.q", phase = backward} : tensor<8x32xf32>
    %mm.50 = aten.mm(%permute_81, %view) {layer = "h.0.attn.q", phase = backward} : tensor<8x8xf32>
    %sum.24 = aten.sum.dim_IntList(%view.155, dim = [0], keepdim = true) {layer = "h.0.attn.q", phase = backward} : tensor<1x8xf32>
    %view.156 = aten.view(%sum.24) {layer = "h.0.attn.q", phase = backward} : tensor<8xf32>
    %view.157 = aten.view(%mm.49) {layer = "h.0.attn.q", phase = backward} : tensor<8x4x8xf32>
    %add.23 = aten.add.Tensor(%add.22, %view.157) {layer = "h.0.attn", phase = backward} : tensor<8x4x8xf32>
    %native_layer_norm_backward.8, %native_layer_norm_backward.8_1, %native_layer_norm_backward.8_2 = aten.native_layer_norm_backward(%add.23, %add, %native_layer_norm_1, %native_layer_norm_2, %h.0.ln_1.weight, %h.0.ln_1.bias, output_mask = [true, true, true]) {layer = "h.0.ln_1", phase = backward} : tensor<8x4x8xf32>, tensor<8xf32>, tensor<8xf32>
    %add.24 = aten.add.Tensor(%add.21, %native_layer_norm_backward.8) {layer = "", phase = backward} : tensor<8x4x8xf32>
    %sum.25 = aten.sum.dim_IntList(%add.24, dim = [0], keepdim = true) {layer = "", phase = backward} : tensor<1x4x8xf32>
    %view.158 = aten.view(%sum.25) {layer = "", phase = backward} : tensor<4x8xf32>
    %embedding_dense_backward = aten.embedding_dense_backward(%view.158, %arange, padding_idx = -1, scale_grad_by_freq = false) {layer = "wpe", phase = backward} : tensor<4x8xf32>
    %embedding_dense_backward.1 = aten.embedding_dense_backward(%add.24, %input_ids, padding_idx = -1, scale_grad_by_freq = false) {layer = "wte", phase = backward} : tensor<16x8xf32>
    func.return %div, %embedding_dense_backward.1, %embedding_dense_backward, %native_layer_norm_backward.8_1, %native_layer_norm_backward.8_2, %mm.50, %view.156, %mm.48, %view.152, %mm.46, %view.148, %mm.44, %view.143, %native_layer_norm_backward.7_1, %native_layer_norm_backward.7_2, %mm.42, %view.140, %mm.40, %view.137, %native_layer_norm_backward.6_1, %native_layer_norm_backward.6_2, %mm.38, %view.134, %mm.36, %view.130, %mm.34, %view.126, %mm.32, %view.121, %native_layer_norm_backward.5_1, %native_layer_norm_backward.5_2, %mm.30, %view.118, %mm.28, %view.115, %native_layer_norm_backward.4_1, %native_layer_norm_backward.4_2, %mm.26, %view.112, %mm.24, %view.108, %mm.22, %view.104, %mm.20, %view.99, %native_layer_norm_backward.3_1, %native_layer_norm_backward.3_2, %mm.18, %view.96, %mm.16, %view.93, %native_layer_norm_backward.2_1, %native_layer_norm_backward.2_2, %mm.14, %view.90, %mm.12, %view.86, %mm.10, %view.82, %mm.8, %view.77, %native_layer_norm_backward.1_1, %native_layer_norm_backward.1_2, %mm.6, %view.74, %mm.4, %view.71, %native_layer_norm_backward_1, %native_layer_norm_backward_2, %mm.1 : tensor<f32>, tensor<16x8xf32>, tensor<4x8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8x8xf32>, tensor<8xf32>, tensor<8x8xf32>, tensor<8xf32>, tensor<8x8xf32>, tensor<8xf32>, tensor<8x8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<32x8xf32>, tensor<32xf32>, tensor<8x32xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8x8xf32>, tensor<8xf32>, tensor<8x8xf32>, tensor<8xf32>, tensor<8x8xf32>, tensor<8xf32>, tensor<8x8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<32x8xf32>, tensor<32xf32>, tensor<8x32xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8x8xf32>, tensor<8xf32>, tensor<8x8xf32>, tensor<8xf32>, tensor<8x8xf32>, tensor<8xf32>, tensor<8x8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<32x8xf32>, tensor<32xf32>, tensor<8x32xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8x8xf32>, tensor<8xf32>, tensor<8x8xf32>, tensor<8xf32>, tensor<8x8xf32>, tensor<8xf32>, tensor<8x8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<32x8xf32>, tensor<32xf32>, tensor<8x32xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<16x8xf32>
  }
}
