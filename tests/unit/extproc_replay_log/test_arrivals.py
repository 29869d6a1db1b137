"""What is replayed of a request, and where the log does not say it."""

from extproc.replay_log.arrivals import FALLBACK_OUTPUT, Arrivals, arrivals_of
from extproc.replay_log.read_log import read_log
from extproc.replay_log.step_fit import fit_steps
from tests.unit.extproc_replay_log.recorded import ALONE, PROMPT, STREAM, alone, encoded, line, refused


def replayed(*records: object, names: dict[str, str] | None = None) -> Arrivals:
    log = read_log(encoded(records), pool=None, where="log")  # type: ignore[arg-type]
    fit, answers = fit_steps(log.records, step_tokens=2048)
    return arrivals_of(log, answers, fit, names=names or {})


def test_a_served_request_is_replayed_as_it_was() -> None:
    found = replayed(line(1.0), line(3.5, prompt_tokens=80, predicted_cached_tokens=64, output_tokens=9, model="m"))
    last = found.requests[1]
    assert (last.at, last.class_name, last.tenant, last.model) == (2.5, "standard", "aaaa", "m")
    assert (last.prompt_tokens, last.cached_tokens, last.output_tokens) == (80, 64, 9)
    assert last.patience_seconds is None
    assert (found.counted, found.estimated, found.borrowed) == (1, 1, 0)


def test_an_output_that_was_not_counted_follows_from_the_time_it_took() -> None:
    seconds = 50 * (ALONE + STREAM) + 1000 * PROMPT
    unread = line(100_000.0, prompt_tokens=1000, max_tokens=200, ended_us=int((seconds + 0.001) * 1e6))
    assert replayed(*alone(100), unread).requests[-1].output_tokens == 50
    cut = line(100_000.0, prompt_tokens=1000, max_tokens=20, ended_us=int((seconds + 0.001) * 1e6))
    assert replayed(*alone(100), cut).requests[-1].output_tokens == 20


def test_a_refused_request_has_the_work_of_the_nearest_one_of_its_kind() -> None:
    found = replayed(
        line(0.0, class_="batch", prompt_tokens=10, output_tokens=1),
        line(5.0, class_="batch", tenant="bbbb", prompt_tokens=20, output_tokens=2),
        line(9.0, class_="batch", prompt_tokens=30, output_tokens=3),
        refused(6.0, class_="batch"),
        refused(6.1, class_="batch", tenant="bbbb"),
        refused(6.2, class_="other"),
        refused(6.3, class_="batch", tenant="bbbb", prompt_tokens=5),
    )
    works = [(each.prompt_tokens, each.output_tokens) for each in found.requests if 5.5 < each.at < 6.5]
    assert works == [(30, 3), (20, 2), (20, 2), (5, 2)]
    assert found.borrowed == 4


def test_where_nothing_was_served_there_is_a_guess() -> None:
    (only,) = replayed(refused(0.0)).requests
    assert (only.prompt_tokens, only.output_tokens) == (1, FALLBACK_OUTPUT)


def test_a_client_that_left_has_its_patience_and_tenants_have_names_where_they_are_known() -> None:
    left = refused(2.0, "client-left", fate="abandoned", waited=3.0)
    found = replayed(line(0.0), left, names={"aaaa": "acme"})
    assert found.requests[1].patience_seconds == 3.001
    assert {each.tenant for each in found.requests} == {"acme"}


def test_an_embedding_generates_nothing() -> None:
    assert replayed(*alone(60), line(9e4, api="embeddings", ended_us=9_000_000)).requests[-1].output_tokens == 1
