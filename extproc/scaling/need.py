"""What the load of one role needs, in pods and in words: work by forecast, chance, and what waits too long. Pure."""

from math import inf

import msgspec

from extproc.scaling.demand import Work
from extproc.scaling.staffing import USUAL_BETA, beta_for, pods_for

DRAIN_SECONDS = 60.0  # in which what waits too long is to be done, once the pods are there


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of work, now and when a pod that is asked for now serves; in busy pods and seconds."""

    level: float
    busy: float  # then
    horizon: float  # until then
    alone_seconds: float  # for which the ready pods have no help: less than the horizon where some start already
    ready: float  # pods
    ttft_seconds: float | None  # promised; None: nothing is
    inter_token_seconds: float | None

    def in_pods_of(self, pace: float) -> "Outlook":
        """Return it in pods that do so many times what one of these does."""
        return msgspec.structs.replace(self, level=self.level / pace, busy=self.busy / pace, ready=self.ready / pace)

    @property
    def words(self) -> str:
        """The forecast in words."""
        if not self.horizon:
            return f"{self.level:.2g} pods busy"
        return f"{self.level:.2g} pods busy, {self.busy:.2g} by forecast in {self.horizon:g} s"


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """The pods that the load needs, not rounded, and why in words."""

    pods: float
    words: str
    is_out_of_reach: bool = False  # of any number of pods, as to a promise


def for_prompts(outlook: Outlook, work: Work) -> Need:
    """Return what the prompts need."""
    own, promise = work.request_seconds, outlook.ttft_seconds
    is_out_of_reach = promise is not None and own >= promise
    slack = None if promise is None or is_out_of_reach else promise - own
    beta = beta_for(outlook.busy, slack_seconds=slack, own_seconds=own)
    pods = pods_for(outlook.busy, beta=beta)
    words = f"prompts keep {outlook.words}, and chance needs {pods - outlook.busy:.2g}"
    draining = _draining(outlook, waiting_seconds=work.waiting_seconds)
    if draining:
        words += f", and what waits too long {draining:.2g}"
    if is_out_of_reach:
        words += f"; a prompt alone takes {own:.3g} s of the promised {promise:g} s: no number of pods keeps that"
    return Need(pods=pods + draining, words=words, is_out_of_reach=is_out_of_reach)


def for_decoding(outlook: Outlook, work: Work) -> Need:
    """Return what decoding needs."""
    pods = pods_for(outlook.busy, beta=USUAL_BETA, streams=work.streams or inf)
    each = "" if work.streams is None else f" ({work.streams:.0f} streams each by {work.limit})"
    words = f"decoding keeps {outlook.words}{each}, and chance needs {pods - outlook.busy:.2g}"
    draining = _draining(outlook, waiting_seconds=work.waiting_decode_seconds)
    if draining:
        words += f", and what waits too long {draining:.2g}"
    if work.is_out_of_reach:
        promise = outlook.inter_token_seconds
        words += f"; one stream alone takes more than the promised {promise:g} s a token: no number of pods keeps that"
    return Need(pods=pods + draining, words=words, is_out_of_reach=work.is_out_of_reach)


def _draining(outlook: Outlook, *, waiting_seconds: float) -> float:
    """Return the pods for what waits longer than the promise allows, in seconds of one pod; 0 where nothing does.

    Until help comes it grows by what the ready pods lack.
    """
    late = waiting_seconds - outlook.ready * (outlook.ttft_seconds or 0.0)
    if late <= 0.0:
        return 0.0
    return (late + max(outlook.busy - outlook.ready, 0.0) * outlook.alone_seconds) / DRAIN_SECONDS


class Outlooks(msgspec.Struct, frozen=True, kw_only=True):
    """Both kinds of work; None: the role has none of it, or too little is known."""

    prompts: Outlook | None = None
    decoding: Outlook | None = None

    def needs(self, work: Work) -> tuple[Need | None, Need | None]:
        """Return what prompts and decoding need."""
        return (
            None if self.prompts is None else for_prompts(self.prompts, work),
            None if self.decoding is None else for_decoding(self.decoding, work),
        )


def larger(needs: tuple[Need | None, Need | None]) -> Need | None:
    """Return the larger need of prompts and decoding, with the word of the other one that a promise is out of reach."""
    given = [each for each in needs if each is not None]
    if not given:
        return None
    need = max(given, key=lambda each: each.pods)
    out_of_reach = next((each for each in given if each.is_out_of_reach), None)
    if out_of_reach is not None and out_of_reach is not need:
        return msgspec.structs.replace(need, words=f"{need.words}; {out_of_reach.words}", is_out_of_reach=True)
    return need
