"""The state that a recurrent layer keeps of a request: the shapes and dtypes of its tensors, of one rank.

Owns no state. A layer keeps the last inputs of its convolution and the state of its recurrence, however long the
request is. Always: a model type that is not in the table has no known state, and asking for it is an error.
Units: elements.

    mamba1     convolution [kernel - 1, inner]                          state [inner, state]
    mamba2     convolution [kernel - 1, inner + 2 x groups x state]     state [heads, head, state]
    delta net  convolution [kernel - 1, 2 x all keys + all values]      state [value heads, value, key]
"""

from collections.abc import Callable, Mapping

from kvtier.config.model_files import ModelFields
from kvtier.errors import ConfigError
from kvtier.registry import suggestion

Shapes = tuple[tuple[int, ...], ...]
Names = Mapping[str, str]


def known_state(model_type: str | None) -> bool:
    return model_type in _STATES


def state_shapes(model: ModelFields, tensor_parallel: int, draft_tokens: int) -> Shapes:
    """The tensors of one layer. draft_tokens: inputs of drafts that the convolution may have to take back.

    Raises ConfigError for a model type whose state is not known, and for sizes that the ranks cannot share.
    """
    model_type = model.text("model_type") or ""
    if model_type not in _STATES:
        problem = f"{model_type!r} has recurrent layers whose state is not known"
        remedy = f"{suggestion(model_type, _STATES)} Else describe it as a group of kind mamba, with its shapes."
        raise model.error("model_type", problem, remedy)
    shapes, names = _STATES[model_type]
    return shapes(model, names, tensor_parallel, draft_tokens)


def state_dtype_field(model_type: str | None) -> tuple[str, str | None]:
    """The field that says the dtype of the recurrence, and what it is without; None is the model's dtype."""
    if model_type == "nemotron_h":
        return "mamba_ssm_cache_dtype", "float32"
    return "mamba_ssm_dtype", None


def _mamba1(model: ModelFields, names: Names, ranks: int, draft_tokens: int) -> Shapes:
    if "expand" in names:
        inner = model.count(names["expand"]) * model.count("hidden_size")
    else:
        inner = model.count("intermediate_size")
    inner = _share(model, inner, ranks, "inner channels")
    # Its kernels can't take a draft back, so no inputs are kept for one.
    return (model.count(names["kernel"]) - 1, inner), (inner, model.count(names["state"]))


def _mamba2(model: ModelFields, names: Names, ranks: int, draft_tokens: int) -> Shapes:
    heads, head, state = (model.count(names[role]) for role in ("heads", "head", "state"))
    groups = model.count(names["groups"])
    if groups % ranks:
        groups = max(groups, ranks)  # a rank needs the groups of its heads: they are copied until each has one
    channels = heads * head + 2 * groups * state
    kept = model.count(names["kernel"]) - 1 + draft_tokens
    return (kept, _share(model, channels, ranks, "channels")), (_share(model, heads, ranks, "heads"), head, state)


def _delta_net(model: ModelFields, names: Names, ranks: int, draft_tokens: int) -> Shapes:
    key_heads, value_heads = model.count("linear_num_key_heads"), model.count("linear_num_value_heads")
    key, value = model.count("linear_key_head_dim"), model.count("linear_value_head_dim")
    channels = 2 * key_heads * key + value_heads * value
    kept = model.count("linear_conv_kernel_dim") - 1 + draft_tokens
    return (kept, _share(model, channels, ranks, "channels")), (_share(model, value_heads, ranks, "heads"), value, key)


def _share(model: ModelFields, total: int, ranks: int, what: str) -> int:
    if total % ranks:
        problem = f"{total} {what} of a state cannot be divided among {ranks} ranks"
        raise ConfigError("tensor_parallel", problem, "Choose a divisor of it.")
    return total // ranks


_MAMBA_N = {
    "heads": "mamba_n_heads",
    "head": "mamba_d_head",
    "state": "mamba_d_state",
    "groups": "mamba_n_groups",
    "kernel": "mamba_d_conv",
}
_STATES: Mapping[str, tuple[Callable[[ModelFields, Names, int, int], Shapes], Names]] = {
    "mamba": (_mamba1, {"kernel": "conv_kernel", "state": "state_size"}),
    "falcon_mamba": (_mamba1, {"kernel": "conv_kernel", "state": "state_size"}),
    "jamba": (_mamba1, {"expand": "mamba_expand", "kernel": "mamba_d_conv", "state": "mamba_d_state"}),
    "mamba2": (
        _mamba2,
        {
            "heads": "num_heads",
            "head": "head_dim",
            "state": "state_size",
            "groups": "n_groups",
            "kernel": "conv_kernel",
        },
    ),
    "bamba": (_mamba2, _MAMBA_N),
    "granitemoehybrid": (_mamba2, _MAMBA_N),
    "falcon_h1": (_mamba2, _MAMBA_N),
    "nemotron_h": (
        _mamba2,
        {
            "heads": "mamba_num_heads",
            "head": "mamba_head_dim",
            "state": "ssm_state_size",
            "groups": "n_groups",
            "kernel": "conv_kernel",
        },
    ),
    "zamba2": (
        _mamba2,
        {
            "heads": "n_mamba_heads",
            "head": "mamba_headdim",
            "state": "mamba_d_state",
            "groups": "mamba_ngroups",
            "kernel": "mamba_d_conv",
        },
    ),
    "qwen3_next": (_delta_net, {}),
    "qwen3_5_text": (_delta_net, {}),
    "qwen3_5_moe_text": (_delta_net, {}),
}
