"""Local programs written by hand, with the eager computation that each stands for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program

MLP = """
builtin.module attributes {dist.local, dist.mesh = #dist.mesh<["data" = 2, "tensor" = 2]>} {
  func.func @step(
    %up.weight: tensor<4x4xf64> {dist.kind = "param", dist.name = "up.weight",
        dist.sharding = #dist.sharding<[{"tensor"}, {}]>},
    %up.bias: tensor<4xf64> {dist.kind = "param", dist.name = "up.bias",
        dist.sharding = #dist.sharding<[{"tensor"}]>},
    %down.weight: tensor<4x4xf64> {dist.kind = "param", dist.name = "down.weight",
        dist.sharding = #dist.sharding<[{}, {"tensor"}]>},
    %x: tensor<3x4xf64> {dist.kind = "input", dist.name = "x",
        dist.sharding = #dist.sharding<[{"data"}, {}]>},
    %tangent: tensor<f64> {dist.kind = "tangent", dist.name = "loss"}
  ) -> (tensor<f64> {dist.kind = "output", dist.name = "0"},
    tensor<4x4xf64> {dist.kind = "grad", dist.name = "up.weight",
        dist.sharding = #dist.sharding<[{"tensor"}, {}]>},
    tensor<4xf64> {dist.kind = "grad", dist.name = "up.bias",
        dist.sharding = #dist.sharding<[{"tensor"}]>},
    tensor<4x4xf64> {dist.kind = "grad", dist.name = "down.weight",
        dist.sharding = #dist.sharding<[{}, {"tensor"}]>}) {
    %wt = aten.permute(%up.weight, dims = [1, 0]) {layer = "up", phase = forward} : tensor<4x4xf64>
    %h = aten.addmm(%up.bias, %x, %wt) {layer = "up", phase = forward} : tensor<3x4xf64>
    %a = aten.relu(%h) {phase = forward} : tensor<3x4xf64>
    %vt = aten.permute(%down.weight, dims = [1, 0])
        {layer = "down", phase = forward} : tensor<4x4xf64>
    %y_part = aten.mm(%a, %vt) {layer = "down", phase = forward} : tensor<3x4xf64>
    %y = dist.all_reduce(%y_part, axes = ["tensor"])
        {layer = "down", phase = forward} : tensor<3x4xf64>
    %yy = aten.mul.Tensor(%y, %y) {phase = forward} : tensor<3x4xf64>
    %s = aten.sum(%yy) {phase = forward} : tensor<f64>
    %loss = dist.all_reduce(%s, axes = ["data"]) {phase = forward} : tensor<f64>
    %two_y = aten.mul.Scalar(%y, other = 2) {phase = backward} : tensor<3x4xf64>
    %dy = aten.mul.Tensor(%two_y, %tangent) {phase = backward} : tensor<3x4xf64>
    %dyt = aten.permute(%dy, dims = [1, 0]) {layer = "down", phase = backward} : tensor<4x3xf64>
    %dv_part = aten.mm(%dyt, %a) {layer = "down", phase = backward} : tensor<4x4xf64>
    %da = aten.mm(%dy, %down.weight) {layer = "down", phase = backward} : tensor<3x4xf64>
    %dh = aten.threshold_backward(%da, %a, threshold = 0) {phase = backward} : tensor<3x4xf64>
    %db_part = aten.sum.dim_IntList(%dh, dim = [0]) {layer = "up", phase = backward} : tensor<4xf64>
    %dht = aten.permute(%dh, dims = [1, 0]) {layer = "up", phase = backward} : tensor<4x3xf64>
    %dw_part = aten.mm(%dht, %x) {layer = "up", phase = backward} : tensor<4x4xf64>
    %dw, %db, %dv = dist.all_reduce(%dw_part, %db_part, %dv_part, axes = ["data"])
        {layer = "", phase = backward} : tensor<4x4xf64>, tensor<4xf64>, tensor<4x4xf64>
    func.return %loss, %dw, %db, %dv : tensor<f64>, tensor<4x4xf64>, tensor<4xf64>, tensor<4x4xf64>
  }
}
"""
"""Training step of `MLPModel`: Megatron's column- then row-parallel linear, batch over data."""


class MLPModel(nn.Module):
    """Sum of squares of `down(relu(up(x)))`, with a parameter and buffers that no step uses."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, dtype=torch.float64)
        self.down = nn.Linear(8, 4, bias=False, dtype=torch.float64)
        if unused:
            self.spare = nn.Parameter(torch.ones(3))
            self.register_buffer("table", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.relu(self.up(x))).square().sum()


def mlp_program() -> Program:
    return Program.parse(MLP)


def one_op_program(
    mesh: str,
    op: str,
    shape: tuple[int, ...],
    given: str,
    wanted: str,
    type_: str,
    results: str = "%y",
) -> Program:
    """`%y = op` of an f64 input `x` of global `shape`, sharded as `given`; y is `wanted`.

    `mesh` reads `a=2,b=3`; `op` is the text after `%y =`; `type_` is the local type of y.
    """
    parsed = Mesh.parse(mesh)
    sharding = ShardingAttr.parse_text(given).on(shape, parsed)
    local = "x".join(str(size) for size in sharding.local_shape(shape))
    axes = ", ".join(f'"{axis.name}" = {axis.size}' for axis in parsed.axes)
    return Program.parse(f"""
builtin.module attributes {{dist.local, dist.mesh = #dist.mesh<[{axes}]>}} {{
  func.func @step(%x: tensor<{local}xf64> {{dist.kind = "input", dist.name = "x",
      dist.sharding = #dist.sharding<{given}>}})
      -> ({type_} {{dist.kind = "output", dist.name = "0",
      dist.sharding = #dist.sharding<{wanted}>}}) {{
    {results} = {op}
    func.return %y : {type_}
  }}
}}
""")


class Squares(nn.Module):
    """The sum of squares of parameters of given shapes; their gradients are twice themselves."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))

    def forward(self) -> Tensor:
        return torch.stack([p.square().sum() for p in self.parameters()]).sum()


def squares_program(
    mesh: Mesh, shapes: Mapping[str, tuple[int, ...]], shardings: Mapping[str, str]
) -> Program:
    """The step of `Squares` with each parameter sharded as its text says."""
    arguments: list[str] = []
    results = ['tensor<f64> {dist.kind = "output", dist.name = "0"}']
    ops: list[str] = []
    total = ""
    for name, shape in shapes.items():
        sharding = ShardingAttr.parse_text(shardings[name]).on(shape, mesh)
        type_ = f"tensor<{'x'.join([*map(str, sharding.local_shape(shape)), 'f64'])}>"
        given = f'dist.name = "{name}", dist.sharding = #dist.sharding<{shardings[name]}>'
        arguments.append(f'%{name}: {type_} {{dist.kind = "param", {given}}}')
        results.append(f'{type_} {{dist.kind = "grad", {given}}}')
        axes = ", ".join(f'"{axis}"' for axis in mesh.names if axis in sharding.axes)
        ops += [
            f"%{name}_d = aten.mul.Scalar(%{name}, other = 2) : {type_}",
            f"%{name}_q = aten.mul.Tensor(%{name}, %{name}) : {type_}",
            f"%{name}_s = aten.sum(%{name}_q) : tensor<f64>",
        ]
        whole = f"%{name}_s"
        if axes:
            ops.append(f"%{name}_r = dist.all_reduce(%{name}_s, axes = [{axes}]) : tensor<f64>")
            whole = f"%{name}_r"
        if total:
            ops.append(f"%{name}_t = aten.add.Tensor({total}, {whole}) : tensor<f64>")
            whole = f"%{name}_t"
        total = whole
    values = ", ".join([total, *(f"%{name}_d" for name in shapes)])
    types = ", ".join(result.partition(" {")[0] for result in results)
    axes = ", ".join(f'"{axis.name}" = {axis.size}' for axis in mesh.axes)
    return Program.parse(f"""
builtin.module attributes {{dist.local, dist.mesh = #dist.mesh<[{axes}]>}} {{
  func.func @step({", ".join(arguments)}) -> ({", ".join(results)}) {{
    {chr(10).join(ops)}
    func.return {values} : {types}
  }}
}}
""")
