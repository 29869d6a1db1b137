"""The fields of `spec.observability`; part of `policy_fields`."""

from extproc.policy.bounds import SHARE
from extproc.policy.field_kinds import Flag, Number, Property, Record, Text

OBSERVABILITY = Record(
    properties={
        "sampleShare": Property(
            kind=SHARE,
            usual="0.02",
            into=("sample_share",),  # beside the policy: a flag says it where no policy does
            words="of the responses, read to compare predicted with realised hits",
        ),
        "auditShare": Property(
            kind=SHARE, usual="1", words="of the decisions, written to the access log and to the audit"
        ),
        "showPromptText": Property(
            kind=Flag(), usual="false", words="true: the page may show how hot prompts begin; nothing else ever does"
        ),
        "gpuHourPrice": Property(
            kind=Number(most=1_000_000.0),
            usual="0",
            words="of one pod's accelerators for an hour, to count what saved prefill is worth; 0: no money is shown",
        ),
        "currency": Property(
            kind=Text(most=8, pattern="^[A-Za-z]+$", words="letters"), usual="USD", words="what the price is in"
        ),
    }
)
