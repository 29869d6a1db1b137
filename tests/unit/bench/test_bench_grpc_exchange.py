"""The scripted exchange of the gRPC comparison, and its table."""

from bench.grpc_exchange import SETUPS, Script, table
from extproc.ext_proc import answers as ext_proc
from extproc.ext_proc.exchange import BODY_CHUNK_BYTES, Exchange, Pick
from extproc.ext_proc.messages import BodyPart, HeadersMessage, read_message


def test_the_script_is_what_the_product_answers_with_as_many_messages_as_the_client_waits_for() -> None:
    for size, answers in ((1, 2), (BODY_CHUNK_BYTES, 2), (BODY_CHUNK_BYTES + 1, 3)):
        script = Script.for_body(size)
        headers, body, end = (read_message(message, ext_proc.wanted_headers()) for message in script.request)
        assert isinstance(headers, HeadersMessage)
        assert isinstance(body, BodyPart)
        assert isinstance(end, BodyPart)
        exchange = Exchange(max_body_bytes=1 << 20)
        exchange.request_headers(
            ext_proc.request_facts(headers),
            mode=headers.request_mode,
            response_mode=headers.response_mode,
            end_of_stream=False,
        )
        assert exchange.request_body(body.content, end_of_stream=False) == ()
        (pick,) = exchange.request_body(end.content, end_of_stream=end.end_of_stream)

        assert isinstance(pick, Pick)
        assert (pick.facts.path, pick.body) == ("/v1/chat/completions", b"x" * size)
        assert (len(exchange.picked(("a:1",))), script.answers) == (answers, answers)


def test_the_first_configuration_is_the_product_s_and_the_ratios_are_taken_round_by_round() -> None:
    costs = {setup.name: [1.5 * (i + 1), 3.0 * (i + 1), 2.0 * (i + 1)] for i, setup in enumerate(SETUPS)}

    lines = table({"cpu_ms_per_exchange": {16: costs}, "loop_ns_per_iteration": [50.0, 120.0, 60.0]}).splitlines()

    assert (SETUPS[0].server, SETUPS[0].loop) == ("own", "uvloop")
    assert [line.split()[-5:] for line in lines[1:-1]] == [
        ["16", f"{2 * (i + 1):.2f}", f"{1.5 * (i + 1):.2f}", f"{3 * (i + 1):.2f}", f"{i + 1:.2f}"]
        for i in range(len(SETUPS))
    ]
    assert lines[-1] == "calibration loop: 60 ns an iteration (50..120)"
