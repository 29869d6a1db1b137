"""Which model a pod serves, by its own `GET /v1/models`. Pure; picker and indexer must read it in the same way.

The name is part of every block key of a pool that declares no model (`kvmesh.io/model`).
"""

import msgspec


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_models = msgspec.json.Decoder(_Models)


def first_base_model(body: bytes) -> str | None:
    """Return the first model that is no adapter: vLLM's first `--served-model-name`; None if there is none.

    vLLM lists the names of its base model in the order of its flag, then the LoRA adapters, each with a `parent`. Other
    names of the base model are aliases of the first. Raise ValueError if this is not what vLLM answers.
    """
    try:
        models = _models.decode(body).data
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not a list of models: {error}") from error
    return next((model.id for model in models if not model.parent), None)
