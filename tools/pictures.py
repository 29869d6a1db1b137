"""The pictures of docs/: `python -m tools.pictures` writes them; a test compares the files with what this draws."""

from collections.abc import Callable

from tools.docs_site import DOCS
from tools.drawing import Arrow, Box, Words, drawing

FOLDER = DOCS / "images"


def request() -> str:
    """Draw the way of a request."""
    steps = (
        ("parse", "the facts"),
        ("classify", "class, tenant"),
        ("tokens", "of the prompt"),
        ("look up", "who holds them"),
        ("choose", "filters, scorers"),
        ("book", "on the pod"),
    )
    parts: list[Box | Words | Arrow] = [
        Box(at=(24, 70), size=(96, 50), title="client", middle=True),
        Box(at=(262, 70), size=(150, 50), title="Envoy", lines=("gateway or sidecar",), tone="envoy", middle=True),
        Box(at=(732, 30), size=(204, 50), title="pod A", lines=("has the prefix, some work",), tone="pod", middle=True),
        Box(at=(732, 96), size=(204, 50), title="pod B", lines=("has nothing, is idle",), tone="idle", middle=True),
        Box(at=(732, 162), size=(204, 50), title="pod C", lines=("has the prefix, is full",), tone="idle", middle=True),
        Box(at=(190, 236), size=(746, 108), tone="picker"),
        Words(at=(206, 259), text="picker", bold=True),
        Box(at=(190, 400), size=(746, 50), title="Redis", tone="redis", middle=True, lines=(REDIS,)),
        Arrow(points=((122, 95), (260, 95))),
        Words(at=(191, 87), text="1  request", anchor="middle", bold=True),
        Arrow(points=((300, 122), (300, 234)), tone="envoy"),
        Words(at=(290, 172), text="2  headers, body", anchor="end", bold=True, tone="envoy"),
        Words(at=(290, 189), text="(ext_proc)", anchor="end", tone="envoy"),
        Arrow(points=((374, 234), (374, 122)), tone="picker"),
        Words(at=(384, 172), text="5  header: pod A,", bold=True, tone="picker"),
        Words(at=(384, 189), text="then two fallbacks", tone="picker"),
        Arrow(points=((414, 95), (562, 95), (562, 55), (730, 55)), tone="pod"),
        Words(at=(572, 47), text="6  body, byte for byte", bold=True, tone="pod"),
        Arrow(points=((843, 214), (843, 234)), dashed=True),
        Words(at=(833, 229), text="all pods' /metrics, every 200 ms", anchor="end"),
        Arrow(points=((620, 346), (620, 398)), both=True, tone="redis"),
        Words(at=(632, 377), text="3  one round trip, within 20 ms", bold=True, tone="redis"),
        Words(at=(206, 377), text="no room on any pod: it waits, or is refused"),
    ]
    for place, (name, what) in enumerate(steps):
        x = 204 + 121 * place
        parts.append(Box(at=(x, 272), size=(113, 52), title=name, lines=(what,), tone="step", middle=True))
        if place:
            parts.append(Arrow(points=((x - 8, 298), (x - 2, 298)), tone="picker"))
    parts.append(
        Words(at=(920, 259), text="4  compares the pods by tokens to compute", anchor="end", bold=True, tone="picker")
    )
    return drawing(
        size=(960, 474),
        title="The way of a request",
        about="The client's request reaches Envoy, which asks the picker. The picker parses it, finds its class, makes "
        "the prompt's tokens, asks Redis in one round trip who holds them, chooses a pod and books it. Envoy sends the "
        "body on.",
        parts=parts,
    )


REDIS = "prefix index  ·  what all pickers have booked  ·  quotas  ·  sessions"
# who holds which block of the prompt: B lacks the fourth, so that its fifth does not count
HOLDERS = {"pod A": "111110", "pod B": "111010", "pod C": "000000"}


def index() -> str:
    """Draw how the index is written, and how it is read."""
    left, cell, top = 330, 74, 126
    parts: list[Box | Words | Arrow] = [
        Words(
            at=(left, 42),
            text="a prompt in blocks of 16 tokens: a key is made of the tokens and the key before",
            bold=True,
        ),
        Box(at=(24, 172), size=(110, 50), title="pods", lines=("KV events",), tone="pod", middle=True),
        Box(
            at=(24, 288),
            size=(210, 66),
            title="indexer",
            lines=("follows each pod's stream,", "asks for what it missed"),
            middle=True,
        ),
        Arrow(points=((79, 224), (79, 286)), tone="pod"),
        Words(at=(90, 252), text="stored, removed,", tone="pod"),
        Words(at=(90, 269), text="numbered (ZMQ)", tone="pod"),
        Box(at=(306, 108), size=(540, 246), tone="redis"),
        Words(at=(326, 338), text="Redis: block key → who holds it", bold=True, tone="redis"),
        Arrow(points=((236, 321), (304, 321)), tone="redis"),
        Words(at=(270, 313), text="a script", anchor="middle", tone="redis"),
        Words(at=(270, 339), text="all or", anchor="middle", tone="redis"),
        Words(at=(270, 355), text="nothing", anchor="middle", tone="redis"),
        Box(at=(306, 390), size=(540, 66), title="picker", tone="picker", middle=True, lines=READ),
        Arrow(points=((576, 356), (576, 388)), tone="picker"),
        Words(at=(588, 377), text="one round trip", tone="picker"),
    ]
    for block in range(6):
        x = left + 12 + cell * block
        parts.append(Box(at=(x, 56), size=(58, 34), title=f"k{block + 1}", middle=True))
        if block:
            parts.append(Arrow(points=((x - 14, 73), (x - 3, 73))))
    for row, (pod, held) in enumerate(HOLDERS.items()):
        y = top + 66 * row
        matched = len(held) - len(held.lstrip("1"))
        for block, has in enumerate(held):
            counts = has == "1" and block < matched
            text = ("counts" if counts else "holds") if has == "1" else ""
            box = Box(
                at=(left + 12 + cell * block, y),
                size=(58, 48),
                tone="pod" if counts else "idle",
                lines=(text,) if text else (),
                middle=True,
            )
            parts.append(box)
        parts.append(Words(at=(left + 12 + cell * 6 - 4, y + 20), text=pod, bold=True))
        parts.append(Words(at=(left + 12 + cell * 6 - 4, y + 37), text=f"{matched} of 6"))
    parts.append(Words(at=(864, 222), text="B lacks k4:", size=12))
    parts.append(Words(at=(864, 238), text="its k5 is of", size=12))
    parts.append(Words(at=(864, 254), text="no use", size=12))
    return drawing(
        size=(960, 480),
        title="The prefix index",
        about="Pods publish KV events. The indexer follows them and changes the index in Redis by one script. A prompt "
        "is a chain of block keys. Pod A holds the first five of six blocks, pod B the first three and the fifth, "
        "which does not count, pod C none.",
        parts=parts,
    )


READ = (
    "matched from the start: pod A 80 tokens, pod B 48, pod C none;",
    "the rest is what each pod would have to compute",
)


def prefill_decode() -> str:
    """Draw a request whose prompt another pod computes."""
    parts: list[Box | Words | Arrow] = [
        Box(at=(24, 90), size=(96, 50), title="client", middle=True),
        Box(at=(250, 90), size=(140, 50), title="Envoy", tone="envoy", middle=True),
        Box(
            at=(620, 74),
            size=(190, 82),
            title="decode pod",
            lines=("generates the answer,", "and is chosen first"),
            tone="pod",
            middle=True,
        ),
        Box(at=(224, 300), size=(192, 66), title="picker", lines=("compares both ways",), tone="picker", middle=True),
        Box(
            at=(620, 292),
            size=(190, 82),
            title="prefill pod",
            lines=("computes the prompt,", "answers no client"),
            tone="pod",
            middle=True,
        ),
        Arrow(points=((122, 106), (248, 106))),
        Words(at=(185, 98), text="1  request", anchor="middle", bold=True),
        Arrow(points=((248, 126), (122, 126))),
        Words(at=(185, 146), text="7  the stream", anchor="middle", bold=True),
        Arrow(points=((290, 142), (290, 298)), tone="envoy"),
        Words(at=(280, 222), text="2  headers, body", anchor="end", bold=True, tone="envoy"),
        Arrow(points=((350, 298), (350, 142)), tone="picker"),
        Words(at=(360, 214), text="5  body that says", bold=True, tone="picker"),
        Words(at=(360, 231), text="where the blocks are", tone="picker"),
        Arrow(points=((418, 320), (618, 320)), tone="picker"),
        Words(at=(518, 312), text="3  one token, no stream", anchor="middle", bold=True, tone="picker"),
        Arrow(points=((618, 350), (418, 350)), tone="pod"),
        Words(at=(518, 370), text="4  where its blocks are", anchor="middle", bold=True, tone="pod"),
        Arrow(points=((392, 115), (618, 115)), tone="picker"),
        Words(at=(505, 106), text="6  the request", anchor="middle", bold=True, tone="picker"),
        Arrow(points=((715, 290), (715, 160)), tone="pod", thick=True),
        Words(at=(732, 220), text="the KV blocks,", bold=True, tone="pod"),
        Words(at=(732, 237), text="by vLLM's connector", tone="pod"),
        Words(
            at=(24, 420),
            text="Where computing there costs more, or a prefill pod fails, steps 3 and 4 are left out: "
            "the decode pod computes the prompt.",
        ),
    ]
    return drawing(
        size=(900, 444),
        title="Prefill and decode on different pods",
        about="The picker chooses a decode pod. Where it pays, it has a prefill pod compute the prompt first, and "
        "tells the decode pod in the request's body where the blocks are. The blocks go from pod to pod. The decode "
        "pod answers the client.",
        parts=parts,
    )


PICTURES: dict[str, Callable[[], str]] = {
    "request.svg": request,
    "index.svg": index,
    "prefill-decode.svg": prefill_decode,
}


def main() -> None:
    """Write all pictures."""
    for name, picture in PICTURES.items():
        (FOLDER / name).write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
