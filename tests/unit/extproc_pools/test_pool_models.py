"""The names under which a pool's models are looked up."""

from extproc.core.models import ServedModel
from extproc.pool_models import as_indexed


def test_a_model_is_looked_up_by_the_name_that_its_blocks_are_indexed_with() -> None:
    served = ServedModel(name="gpt", aliases=frozenset({"llama", "other"}))
    indexed = ServedModel(name="llama", aliases=frozenset({"gpt", "other"}))
    assert as_indexed(served, "llama") == indexed
    assert as_indexed(served, None) is as_indexed(served, "gpt") is as_indexed(served, "strange") is served
