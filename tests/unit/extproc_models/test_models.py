"""What a table of models knows of its names."""

from extproc.models.models import ModelRule, ModelTable, ModelTarget, ServedModel, StickyBy

LLAMA = ServedModel(name="org/llama", aliases=frozenset({"llama"}), adapters=frozenset({"sql-lora"}))
RULES = (
    ModelRule(model="gpt-x", targets=(ModelTarget(model="org/llama"),)),
    ModelRule(
        model="chat",
        targets=(ModelTarget(model="llama", weight=9.0), ModelTarget(model="org/other")),
        sticky_by=StickyBy.HEADER,
        sticky_header="x-tenant",
    ),
    ModelRule(model="*", targets=(ModelTarget(model="org/other"),)),
)
TABLE = ModelTable(served=(LLAMA, ServedModel(name="org/other")), rules=RULES)


def test_the_table_knows_its_names_and_the_headers_that_its_rules_read() -> None:
    assert TABLE.names() == {"org/llama", "llama", "sql-lora", "org/other", "gpt-x", "chat"}
    assert TABLE.sticky_headers() == {"x-tenant"}


def test_a_name_leads_to_its_model_or_rule() -> None:
    assert TABLE.served_as("llama") is TABLE.served_as("org/llama") is TABLE.base_of("sql-lora") is LLAMA
    assert (TABLE.served_as("sql-lora"), TABLE.base_of("llama")) == (None, None)
    assert (TABLE.rule_for("chat"), TABLE.rule_for("anything")) == (RULES[1], RULES[2])
