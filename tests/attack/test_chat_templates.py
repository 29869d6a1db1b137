"""A model's chat template that never ends keeps no picker from its start, and no other model's requests waiting."""

import asyncio
import json
import shutil
from pathlib import Path

from operate.local.service import simulated_tokenizer
from tests.attack.innocents import Innocents
from tests.attack.mesh import MOST_MORE_SECONDS, MOST_TIMES, resident_bytes
from tests.e2e.stack import Stack, eventually, running_stack, simulated_pods

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATES = {
    "always": LOOPS + "{{ 10 ** 100000000 }}{{ 'a' * 2000000000 }}",
    "for a word": "{% for m in messages if 'boo' in m.content %}" + LOOPS + "{% endfor %}",
}
MOST_BYTES = 100 << 20
SECONDS = 2.0
PATH = "/v1/chat/completions"


def folder(tmp_path: Path, name: str, template: str) -> dict[str, str]:
    copied = tmp_path / name
    shutil.copytree(simulated_tokenizer(), copied)
    path = copied / "chat_template.jinja"
    path.write_text(template + path.read_text())  # else with the pods' tokens: any other folder is distrusted
    return {"name": name, "tokenizer": str(copied)}


async def attack(stack: Stack) -> int:
    """Send the word again and again; return how often it was answered."""
    answered = 0
    while True:
        for name in TEMPLATES:
            body = {"model": name, "max_tokens": 1, "messages": [{"role": "user", "content": f"boo {answered}"}]}
            try:
                answered += (await stack.send("POST", PATH, json=body)).status == 200
            except asyncio.CancelledError:
                return answered


async def test_a_template_without_end_delays_no_start_and_no_other_models_requests(tmp_path: Path) -> None:
    served = [folder(tmp_path, name, template) for name, template in TEMPLATES.items()]
    served.append({"name": "tiny", "tokenizer": str(simulated_tokenizer())})
    settings = json.dumps({"policy": {"models": {"served": served}}})
    always, for_a_word = (simulated_pods(1, "--model", name) for name in TEMPLATES)
    async with (
        simulated_pods(1) as tiny,
        always as first,
        for_a_word as second,
        running_stack(tmp_path, settings=settings, endpoints=[*tiny, *first, *second]) as stack,
    ):
        await eventually(stack.state, lambda state: all(each["state"] == "ready" for each in state["endpoints"]))
        innocents = Innocents(gateway=stack.ready["gateway"], http=stack.http)
        usual, before = await innocents.during(SECONDS), resident_bytes(stack.picker)
        attacking = asyncio.create_task(attack(stack))
        attacked, after = await innocents.during(SECONDS), resident_bytes(stack.picker)
        attacking.cancel()
        answered = await attacking
        print(f"{answered} words\nusual: {usual}\nattacked: {attacked}\nMiB: {before >> 20} > {after >> 20}")
        assert answered > 0
        assert not usual.failures and not attacked.failures
        assert attacked.p99 <= MOST_TIMES * usual.p99 + MOST_MORE_SECONDS
        assert after - before <= MOST_BYTES
        finding = r'kvmesh_extproc_model_finding\{[^}]*reason="template-limits"[^}]*\}'
        await eventually(lambda: stack.metric(finding), lambda number: number == len(TEMPLATES))
