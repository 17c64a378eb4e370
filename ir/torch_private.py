# pyright: basic
"""Torch's private names: all that the package uses.

Torch may move or drop a private name in any release, so each is looked for when it is first used:

- `_PLACES` holds the names that nothing can stand in for. A torch without one of them is refused,
  in an ImportError that names the newest torch tested.
- `_COPYING` holds the names by which a capture copies repeated blocks. Where one is missing, the
  capture traces every block, which takes longer.
- `_REPLACED` holds the functions that a capture replaces while it traces. Where one is missing,
  torch's own behaviour stays, and a note says what follows.

A `TorchNote` says which names are missing, once in a process. Attributes that `torch.nn.Module` and
`torch.Tensor` give to subclasses, such as `_parameters` and `_backward_hooks`, are no private names
here, and neither are those of ATen's ops.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from operator import attrgetter
from typing import Any
from unittest import mock

import torch
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from shardweave.ir.notes import TorchNote, warn

__all__ = [
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "UnsupportedOperatorException",
    "pytree",
]

NEWEST_TESTED = "2.14"
"""The newest torch with which all tests have passed."""

_C = "torch._C:"
_DYNAMO = "torch._dynamo.variables"
_ERROR = f"{_DYNAMO}:ExceptionVariable"
_EXPORT = "torch._dynamo.functional_export"
_TRANSLATOR = "torch._dynamo.symbolic_convert:InstructionTranslatorBase"
_RAISED = "torch._dynamo.symbolic_convert:ExceptionStack"

_PLACES: dict[str, tuple[str, ...]] = {
    # Dispatch and autograd
    "is_under_transform": (f"{_C}_are_functorch_transforms_active",),
    "without_overrides": (f"{_C}DisableTorchFunctionSubclass",),
    "without_dispatch": (f"{_C}_DisableTorchDispatch",),
    "make_wrapper": ("torch:Tensor._make_wrapper_subclass",),
    "HigherOrderOperator": ("torch._ops:HigherOrderOperator",),
    "backward_pass_number": (f"{_C}_current_graph_task_id",),
    "autograd_engine": ("torch.autograd:Variable._execution_engine",),
    "keeps_graph": ("torch._C._autograd:_get_current_graph_task_keep_graph",),
    "disable_current_modes": ("torch.utils._python_dispatch:_disable_current_modes",),
    "current_modes": ("torch.utils._python_dispatch:_get_current_dispatch_mode_stack",),
    "standalone_compile": ("torch._inductor:standalone_compile",),
    # Modules and graphs
    "AdaptiveLogSoftmaxOutput": ("torch.nn.modules.adaptive:_ASMoutput",),
    "BatchNorm": ("torch.nn.modules.batchnorm:_BatchNorm",),
    "assign_attribute": ("torch.fx.graph_module:_assign_attr",),
    "TreeCodeGen": ("torch.fx.graph:_PyTreeCodeGen",),
    "PyTreeInfo": ("torch.fx.graph:_PyTreeInfo",),
    # torch.distributed
    "default_store": ("torch.distributed.distributed_c10d:_get_default_store",),
    "StridedShard": ("torch.distributed.tensor.placement_types:_StridedShard",),
    "DTensorSpec": ("torch.distributed.tensor._dtensor_spec:DTensorSpec",),
    # Tracing
    "dynamo_graph": (f"{_EXPORT}:_dynamo_graph_capture_for_export",),
    "functional_export": (_EXPORT,),
    "ExportOutput": (f"{_EXPORT}:ExportTracerOutput",),
    "TrackedDict": ("torch.export._trace:_ExportModuleSpecTrackerDict",),
    "restore_state_dict": ("torch.export._trace:_restore_state_dict",),
    "get_decompositions": ("torch._decomp:get_decompositions",),
    "joint_export": ("torch._functorch.aot_autograd:aot_export_joint_with_descriptors",),
    "aot": ("torch._functorch._aot_autograd.descriptors",),
    "OutputGraph": ("torch._dynamo.output_graph:OutputGraph",),
    "InstructionTranslator": (_TRANSLATOR,),
    "AttributeMutationExisting": (f"{_DYNAMO}.base:AttributeMutationExisting",),
    "ValueMutationExisting": (f"{_DYNAMO}.base:ValueMutationExisting",),
    "TorchFunctionModes": (f"{_DYNAMO}.torch_function:TorchFunctionModeStackVariable",),
    "ConstDictVariable": (f"{_DYNAMO}:ConstDictVariable",),
    "LazyVariableTracker": (f"{_DYNAMO}:LazyVariableTracker",),
    "SymNodeVariable": (f"{_DYNAMO}:SymNodeVariable",),
    "TensorVariable": (f"{_DYNAMO}:TensorVariable",),
    "UnknownVariable": (f"{_DYNAMO}.misc:UnknownVariable",),
}
"""Torch's objects that are used as they are: the name here, and the places of torch's versions."""

_COPYING: dict[str, tuple[str, ...]] = {
    "AttributeMutationNew": (f"{_DYNAMO}.base:AttributeMutationNew",),
    "ValueMutationNew": (f"{_DYNAMO}.base:ValueMutationNew",),
    "BaseListVariable": (f"{_DYNAMO}:BaseListVariable",),
    "ConstantVariable": (f"{_DYNAMO}:ConstantVariable",),
    "RangeVariable": (f"{_DYNAMO}:RangeVariable",),
    "TupleVariable": (f"{_DYNAMO}:TupleVariable",),
    "num_function_modes": (f"{_C}_len_torch_function_stack",),
    "wrap_proxy": (f"{_DYNAMO}.builder:wrap_fx_proxy",),
}
"""Names, as in `_PLACES`, that copying traced blocks needs; without them blocks are traced."""

_TEXTS = "texts of exceptions that forward catches may differ from eager's"
_REPLACED: dict[str, tuple[tuple[str, ...], str]] = {
    # For copies of blocks, and there alone
    "export root": ((f"{_EXPORT}:clean_export_root",), ""),
    "module call": ((f"{_DYNAMO}:UnspecializedNNModuleVariable.call_function",), ""),
    "attribute read": (
        (
            f"{_DYNAMO}:UserDefinedObjectVariable.tp_getattro_impl",
            f"{_DYNAMO}:UserDefinedObjectVariable.var_getattr",  # before torch 2.14
        ),
        "",
    ),
    # What a model's code does
    "graph's end": (("torch._dynamo.output_graph:OutputGraph.cleanup",), ""),
    "recurrent layers": (("torch._decomp.decompositions:_rnn_helper",), ""),
    "triton ops": (
        ("torch.export._trace:custom_triton_ops_decomposition_disabled",),
        "ops of torch.library.triton_op are refused",
    ),
    "is compiling": (
        ("torch.compiler:_is_compiling_flag",),
        "models take the way that they have for eager calls",
    ),
    "export state": (
        (f"{_EXPORT}:_compiling_state_context",),
        "models take the way that they have for exports, such as a mask for causal attention",
    ),
    "causal mask": (
        ("torch.nn.modules.transformer:_detect_is_causal_mask",),
        "nn.Transformer with a mask is not captured unless is_causal is given",
    ),
    "distribution checks": (
        ("torch.distributions:Distribution._validate_args",),
        "distributions are captured with validate_args=False alone",
    ),
    "flex device": (
        ("torch.nn.attention.flex_attention:_validate_device",),
        "flex_attention is captured on GPUs alone",
    ),
    "flex width": (
        ("torch.nn.attention.flex_attention:_validate_embed_dim",),
        "flex_attention is captured for the head dims of its kernels alone",
    ),
    "grouped product": (
        ("torch._meta_registrations:_meta_grouped_mm_common",),
        "torch._grouped_mm is captured in bfloat16 alone",
    ),
    "module stack": (
        (f"{_DYNAMO}.nn_module:record_nn_module_stack",),
        "errors do not say in which module a capture failed",
    ),
    "raised": ((f"{_RAISED}.set_current_exception", f"{_TRANSLATOR}.do_raise"), _TEXTS),
    "formatted text": ((f"{_DYNAMO}.misc:StringFormatVariable.create",), _TEXTS),
    "exception text": ((f"{_ERROR}.tp_str_impl", f"{_DYNAMO}:BuiltinVariable.call_str"), _TEXTS),
    "array": (
        (f"{_DYNAMO}.builder:cache_real_value_when_export",),
        "models whose forward reads numpy arrays are not captured",
    ),
    # Time and memory
    "cloned input": (
        (f"{_DYNAMO}.builder:_clone_input",),
        "a capture copies each parameter, and fails inside torch.vmap",
    ),
    "shape guards": (
        (f"{_EXPORT}:_suggest_or_raise_constraint_violation",),
        "captures take longer",
    ),
    "source lines": ((f"{_TRANSLATOR}.get_line_of_code_header",), "captures take longer"),
    "exported root": ((f"{_EXPORT}:ModuleToTrace",), "captures take longer"),
}
"""Objects patched during a trace: their places in torch, and what a note says if torch lacks them.
If that text is empty, shardweave refuses to run."""

_FOR_COPIES = ("export root", "module call", "attribute read")

_OF_TRANSLATOR = (
    "block_stack current_instruction f_code fake_mode nn_module_stack num_calls output parent "
    "symbolic_torch_function_state.mode_stack"
).split()
_OF_OUTPUT = (
    "is_root_tracer module_key_name nn_modules param_name_to_source resolve_source_value "
    "root_tracer.graph root_tracer.traced_sources side_effects.store_attr_mutations "
    "side_effects.tensor_hooks side_effects._get_modified_vars"
).split()
"""Attributes of dynamo's objects that copying traced blocks reads."""


class _Missing:
    """Placeholder for a class that the installed torch lacks: no object is an instance."""


def __getattr__(name: str) -> Any:
    """Look for a name when it is first used: dynamo takes a second to import."""
    if name not in _PLACES and name not in _COPYING:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    place = _place_of(_PLACES.get(name) or _COPYING[name])
    if place is None and name in _PLACES:
        raise ImportError(_refusal(_PLACES[name][0]))
    value = _Missing if place is None else _value_at(place)
    globals()[name] = value
    return value


def _refusal(place: str) -> str:
    return (
        f"torch {torch.__version__} has no {_words(place)}, which shardweave needs; the newest "
        f"torch that it was tested with is {NEWEST_TESTED}: install that one."
    )


def _words(place: str) -> str:
    return place.replace(":", ".")


def _value_at(place: str) -> Any:
    module, _, path = place.partition(":")
    imported = import_module(module)
    return attrgetter(path)(imported) if path else imported


@cache
def _place_of(places: tuple[str, ...]) -> str | None:
    for place in places:
        with contextlib.suppress(ImportError, AttributeError):
            _value_at(place)
            return place
    return None


_said: set[str] = set()


def _note(text: str) -> None:
    """Warn about the installed torch, once in a process for each text."""
    if text not in _said:
        _said.add(text)
        warn(f"torch {torch.__version__} {text}", TorchNote)


def note_newer() -> None:
    """Warn, once, of a torch that is newer than those tested."""
    if _minor(torch.__version__) > _minor(NEWEST_TESTED):
        _note(f"is newer than any that shardweave was tested with; the newest is {NEWEST_TESTED}.")


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


# What is replaced while a model is traced


def original_of(key: str) -> Any:
    """Return torch's object for a key of `_REPLACED`; if torch lacks it, None or an ImportError."""
    place = _replaced_place(key)
    return None if place is None else _value_at(place)


def _replaced_place(key: str) -> str | None:
    places, consequence = _REPLACED[key]
    place = _place_of(places)
    if place is None and not consequence:
        raise ImportError(_refusal(places[0]))
    return place


@contextlib.contextmanager
def replaced(news: Mapping[str, Any]) -> Iterator[None]:
    """Patch torch's objects, by key of `_REPLACED`, in the context; note those that torch lacks."""
    with contextlib.ExitStack() as stack:
        for key, new in news.items():
            place = _replaced_place(key)
            if place is not None:
                stack.enter_context(mock.patch.object(*_owner_and_name(place), new))
                continue
            places, consequence = _REPLACED[key]
            _note(f"has no {_words(places[0])}: {consequence}.")
        yield


def _owner_and_name(place: str) -> tuple[Any, str]:
    module, _, path = place.partition(":")
    owner, _, name = path.rpartition(".")
    return _value_at(f"{module}:{owner}"), name


@contextlib.contextmanager
def configured(**options: Any) -> Iterator[None]:
    """Set options of dynamo in the context; options that this torch lacks are skipped."""
    config = import_module("torch._dynamo.config")
    with config.patch({name: value for name, value in options.items() if hasattr(config, name)}):
        yield


def marked_outputs_allowed() -> contextlib.AbstractContextManager[Any]:
    """Let a model return a tensor that forward marked as requiring a gradient (torch 2.12
    checks)."""
    name = "_check_requires_grad_intermediate_outputs"
    graph = _value_at("torch._dynamo.output_graph:OutputGraph")
    return mock.patch.object(graph, name) if hasattr(graph, name) else contextlib.nullcontext()


def not_exporting() -> contextlib.AbstractContextManager[Any]:
    """Make `is_exporting` False for traced code inside the context; before 2.12 it is True."""
    place = _place_of((f"{_DYNAMO}.torch:tracing_state_functions",))
    answers = _value_at(place)() if place else {}
    return mock.patch.dict(answers, {torch.compiler.is_exporting: False})


def unordered(op: str) -> contextlib.AbstractContextManager[Any]:
    """Remove an op's effect in the context; the effect would order the op's calls in graphs."""
    try:
        holder = _value_at("torch._library.simple_registry:singleton").find(op).effect
        return mock.patch.object(holder, "_effect", None)
    except (ImportError, AttributeError):
        _note("has no effects of ops: models that solve linear systems may not be captured.")
        return contextlib.nullcontext()


_LOGS = tuple(
    logging.getLogger(name)
    for name in ("torch._subclasses.fake_tensor", "torch._dynamo.metrics_context")
)


@contextlib.contextmanager
def silent_logs() -> Iterator[None]:
    """Silence torch's logs of expected errors, in the context. Fake tensors log why they refuse an
    op; torch 2.11 logs that it cannot log functions."""
    before = [log.disabled for log in _LOGS]
    for log in _LOGS:
        log.disabled = True
    try:
        yield
    finally:
        for log, was_disabled in zip(_LOGS, before, strict=True):
            log.disabled = was_disabled


def modified_variables(side_effects: Any) -> Iterator[Any]:
    """Dynamo's variables that traced code has modified."""
    return side_effects._get_modified_vars()


def codegen_of(graph: torch.fx.Graph) -> Any:
    return graph._codegen


def keep_tree_specs(graph: torch.fx.GraphModule) -> None:
    """Give a graph module the tree specs of its inputs and outputs, as `recompile` does."""
    if isinstance(codegen := codegen_of(graph.graph), __getattr__("TreeCodeGen")):
        graph._in_spec = codegen.pytree_info.in_spec
        graph._out_spec = codegen.pytree_info.out_spec


# Copies of blocks


def missing_for_copies(translator: Any = None) -> str:
    """Return the name of an attribute of torch that copying traced blocks needs and torch lacks; ''
    if none is missing. translator: dynamo's instruction translator, whose attributes are checked
    too."""
    places = [*_COPYING.values(), *(_REPLACED[key][0] for key in _FOR_COPIES)]
    missing = [_words(place[0]) for place in places if _place_of(place) is None]
    tracer = _value_at("torch._dynamo.output_graph:SubgraphTracer").__init__
    if "traced_sources" not in tracer.__code__.co_names:
        missing.append("traced_sources")
    if translator is not None:
        missing += _missing_attributes(translator, _OF_TRANSLATOR)
        if "output" not in missing:
            missing += _missing_attributes(translator.output, _OF_OUTPUT)
    return missing[0] if missing else ""


def _missing_attributes(value: Any, names: Sequence[str]) -> list[str]:
    missing: list[str] = []
    for name in names:
        try:
            attrgetter(name)(value)
        except AttributeError:
            missing.append(name)
    return missing


def note_no_copies(missing: str) -> None:
    """Note that every repeated block is traced, as torch lacks `missing`."""
    _note(
        f"has no {missing}: a capture traces each of a model's repeated blocks, which takes longer."
    )


# Ops, tensors and memory


def schema_of(overload: OpOverload[..., Any]) -> Any:
    return overload._schema


def schemas() -> list[Any]:
    return torch._C._jit_get_all_schemas()


def is_composite(overload: OpOverload[..., Any]) -> bool:
    """True if torch decomposes an op (CompositeImplicit) where a backend has no kernel for it."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(overload.name(), "CompositeImplicitAutograd")


def memory_key(tensor: torch.Tensor) -> int:
    """Return an id of a tensor's storage, equal for all tensors on that memory, fake ones too."""
    return tensor.untyped_storage()._cdata


def num_users(tensor: torch.Tensor) -> int:
    """Count the references to a tensor's storage: tensors, and the storage object made here."""
    return torch._C._storage_Use_Count(memory_key(tensor))


version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""The number of times that a tensor was written to in place."""

local_part: Callable[[Any], torch.Tensor] = attrgetter("_local_tensor")
"""The local tensor of a DTensor itself, not a view of it."""

step_hooks = attrgetter("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""An optimizer's own hooks before and after its steps, by key, in their order."""
is_profiling = partial(getattr, torch.autograd.profiler, "_is_profiler_enabled", False)
"""True if a torch profiler is recording ranges."""


def dtensor_spec(tensor: Any) -> Any:
    """The spec of a DTensor: its mesh, placements, shape and dtype."""
    return tensor._spec


def set_strided_spec(tensor: Any, mesh: Any, placements: Any) -> None:
    """Set a DTensor's mesh and placements, with strided shards that imply no shard order."""
    kind, meta = __getattr__("DTensorSpec"), tensor._spec.tensor_meta
    tensor._spec = kind(mesh, placements, meta, use_strided_shard_as_shard_order=False)


def take_strided_shards_as_they_are() -> None:
    """Let results of DTensor's ops keep its strided shards, as they do from torch 2.13 on.

    Earlier, torch takes any strided shards for an order of plain shards, and cannot gather others.
    So each spec with strided shards is marked with whether they are such an order.
    """
    if torch.__version__ >= (2, 13):  # pyright: ignore[reportOperatorIssue]
        return
    kind, strided = __getattr__("DTensorSpec"), __getattr__("StridedShard")
    make = kind.__post_init__

    def make_by_shards(spec: Any) -> None:
        if spec.use_strided_shard_as_shard_order is None and any(
            isinstance(placement, strided) for placement in spec.placements
        ):
            order = kind._maybe_convert_StridedShard_to_shard_order(
                tuple(spec.placements), spec.mesh
            )
            spec.use_strided_shard_as_shard_order = order is not None
        make(spec)

    kind.__post_init__ = make_by_shards


_ATEN = torch.library.Library("aten", "IMPL", "Meta")


def correct_attention_types() -> None:
    """Make torch before 2.13 infer a float64 logsumexp for attention in float64."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    query = torch.empty(1, 1, 1, 1, dtype=torch.float64, device="meta")
    key = torch._C.DispatchKey.Meta
    infer = op.py_kernels.get(key)
    if infer is None or op(query, query, query)[1].dtype == query.dtype:
        return

    def infer_as_the_kernel(query: torch.Tensor, *args: Any, **options: Any) -> Any:
        output, logsumexp = infer(query, *args, **options)
        return output, logsumexp.double() if query.dtype == torch.float64 else logsumexp

    _ATEN.impl(op, infer_as_the_kernel, allow_override=True)
    op.py_kernels[key] = infer_as_the_kernel  # for the dispatcher in Python, which traces use
    op._dispatch_cache.pop(key, None)
