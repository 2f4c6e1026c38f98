"""Draw docs/images/concepts.svg, one round in one picture: ``python scripts/draw_concepts.py``.

Drawn with pages of 4 rows and a window of 8, so that a ring has 4 pages; the first 36 tokens were a prefix hit. The
card paints its own background, light or dark, so it reads on any page.
"""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "docs/images/concepts.svg"
WIDTH, HEIGHT = 1040, 616
RING, WINDOW, HIT, ANCHOR, STOOD = 16, 8, 36, 50, 3
WORDS = ("sat", "on", "the", "mat", "and", "a")
STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de } .panel { fill: #f6f8fa; stroke: #d0d7de }
  text { font: 14px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328 }
  .title { font-weight: 600; font-size: 16px } .small { font-size: 12px } .soft { fill: #59636e }
  .mid { text-anchor: middle } .code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 13px }
  .box { fill: #ffffff; stroke: #8c959f } .tap { fill: #ddf4ff; stroke: #0969da }
  .seen { fill: #54aeff; stroke: #0969da }
  .good { fill: #aceebb; stroke: #1a7f37 } .bad { fill: #ffcecb; stroke: #cf222e }
  .own { fill: #fae17d; stroke: #9a6700 }
  .hole { fill: none; stroke: #8c959f; stroke-dasharray: 3 3 } .line { fill: none; stroke: #59636e; stroke-width: 1.6 }
  .path { fill: none; stroke: #1a7f37; stroke-width: 2.5 } .tip { fill: #59636e }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #3d444d } .panel { fill: #151b23; stroke: #3d444d }
    text { fill: #f0f6fc } .soft { fill: #9198a1 } .box { fill: #212830; stroke: #656c76 }
    .tap { fill: #10304f; stroke: #4493f8 } .seen { fill: #1f6feb; stroke: #79c0ff }
    .good { fill: #196c2e; stroke: #3fb950 } .bad { fill: #8e1519; stroke: #f85149 }
    .own { fill: #7d4e00; stroke: #d29922 }
    .hole { stroke: #656c76 } .line { stroke: #9198a1 } .path { stroke: #3fb950 } .tip { fill: #9198a1 }
  }
"""


def box(x: float, y: float, w: float, h: float, kind: str = "box", radius: float = 4) -> str:
    """A rectangle of a class."""
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{w}" height="{h}" rx="{radius}"/>'


def say(x: float, y: float, words: object, kind: str = "") -> str:
    """Text on its baseline."""
    return f'<text class="{kind}" x="{x}" y="{y}">{words}</text>'


def chip(x: float, y: float, w: float, words: object, kind: str = "box", height: float = 26) -> str:
    """A box with a word in its middle."""
    return box(x, y, w, height, kind) + say(x + w / 2, y + height / 2 + 4.5, words, "mid small")


def arrow(*points: tuple[float, float]) -> str:
    """A line through points, with a tip at its end."""
    d = "M" + " L".join(f"{x} {y}" for x, y in points)
    return f'<path class="line" d="{d}" marker-end="url(#tip)"/>'


def panel(x: float, y: float, number: str, title: str, code: str) -> list[str]:
    """One of the four steps."""
    return [box(x, y, 480, 270, "panel", 8), say(x + 16, y + 28, f"{number}  {title}", "title"),
            say(x + 16, y + 50, code, "code soft")]  # fmt: skip


def target(x: float, y: float) -> list[str]:
    """Tokens in, layers, taps out."""
    out = panel(x, y, "1", "The target runs tokens", "hidden states of some layers are kept: taps")
    out += [say(x + 20, y + 82, "head", "small soft"), chip(x + 70, y + 66, 190, "logits", "own")]
    for i in range(6):
        tapped = i in (1, 3, 4)
        top = y + 96 + 22 * i
        out.append(chip(x + 70, top, 190, f"layer {5 - i}", "tap" if tapped else "box", 18))
        if tapped:
            out.append(arrow((x + 262, top + 9), (x + 318, top + 9)))
    out += [box(x + 322, y + 112, 128, 82, "tap"), say(x + 386, y + 148, "taps", "mid"),
            say(x + 386, y + 168, "[rows, T·H]", "mid code")]  # fmt: skip
    for i in range(4):
        out.append(chip(x + 70 + 48 * i, y + 234, 46, ANCHOR - 4 + i))
    return [
        *out,
        say(x + 20, y + 251, "tokens", "small soft"),
        say(x + 272, y + 251, "at these positions", "small soft"),
    ]


def context(x: float, y: float) -> list[str]:
    """The ring of pages, each row with its position."""
    out = panel(x, y, "2", "Append the taps to the window KV", f"append(start={ANCHOR - 4}, length=4)")
    for slot in range(RING):
        page, row = divmod(slot, 4)
        position = ANCHOR - RING + (slot - ANCHOR) % RING
        left, top = x + 26 + 110 * page, y + 92 + 29 * row
        kind = "hole" if position < HIT else "seen" if position > ANCHOR - WINDOW else "tap"
        out.append(chip(left, top, 98, "hole" if position < HIT else position, kind))
    for page in range(RING // 4):
        out.append(say(x + 75 + 110 * page, y + 82, f"page {page}", "mid small soft"))
    notes = ("A ring of ceil(W/page) + 2 pages, whatever the length. A row's slot follows",
             "from its position, and each row carries its position: what was never written,",
             "or is another's, cannot match. Bright: what the next block's anchor sees.")  # fmt: skip
    return out + [say(x + 16, y + 226 + 16 * i, line, "small soft") for i, line in enumerate(notes)]


def block(x: float, y: float) -> list[str]:
    """Anchor and masks in, candidates, a path through them."""
    out = panel(x, y, "3", "Propose a block in one pass", f"propose(anchor='on', start={ANCHOR})")
    at = [x + 20 + 56 * i for i in range(8)]
    out += [chip(left, y + 66, 50, "on" if i == 0 else "mask", "own" if i == 0 else "box") for i, left in enumerate(at)]
    out += [say(left + 25, y + 106, ANCHOR + i, "mid small soft") for i, left in enumerate(at)]
    out += [
        chip(x + 20, y + 114, 442, "drafter: few layers over the context and its own rows; the target's head", "tap")
    ]
    chosen = (0, 1, 0, 0, 2, 0, 1)
    for i, left in enumerate(at[1:]):
        kinds = ["good" if c == chosen[i] else "box" for c in range(3)]
        out += [f'<circle class="{k}" cx="{left + 25}" cy="{y + 164 + 20 * c}" r="6"/>' for c, k in enumerate(kinds)]
        out.append(chip(left, y + 222, 50, draft(i), "good"))
    dots = " L".join(f"{left + 25} {y + 164 + 20 * c}" for left, c in zip(at[1:], chosen, strict=True))
    out.append(f'<path class="path" d="M{dots}"/>')
    out += [say(x + 20, y + 174, "best of", "small soft"), say(x + 20, y + 190, "each row,", "small soft"),
            say(x + 20, y + 206, "one path", "small soft"), say(x + 20, y + 240, "drafts", "small soft")]  # fmt: skip
    return out


def draft(i: int) -> str:
    """The drafter's word for row i+1: right where it stands."""
    return WORDS[i + 2] if i < STOOD else ("near", "the", "dog", ".")[i - STOOD]


def verdict(x: float, y: float) -> list[str]:
    """The target's one pass over the block, and what is kept."""
    own = WORDS[STOOD + 2]
    out = panel(x, y, "4", "Verify: one target pass over the block", f"accepted={STOOD}, next_token='{own}'")
    kinds = ["own"] + ["good"] * STOOD + ["bad"] + ["hole"] * (7 - STOOD - 1)
    for i, kind in enumerate(kinds):
        left = x + 20 + 56 * i
        out.append(chip(left, y + 88, 50, draft(i - 1) if i else WORDS[1], kind))
        out.append(say(left + 25, y + 128, ANCHOR + i, "mid small soft"))
        if 0 < i <= STOOD + 1:
            out.append(chip(left, y + 160, 50, WORDS[i + 1], "good" if i <= STOOD else "own"))
    out += [
        say(x + 20, y + 80, "anchor and drafts", "small soft"),
        say(x + 76, y + 152, "what the target says there", "small soft"),
    ]
    notes = (f"Drafts stand as long as the target says the same: {ANCHOR + 1} to {ANCHOR + STOOD}. Its own token",
             f"replaces the first that falls, and is the next anchor. Taps of {ANCHOR} to {ANCHOR + STOOD} are",
             "appended, those behind ignored. The output is the target's own.")  # fmt: skip
    return out + [say(x + 16, y + 216 + 16 * i, line, "small soft") for i, line in enumerate(notes)]


def picture() -> str:
    """The whole SVG."""
    left, right, top, bottom = 20, 540, 20, 326
    parts = [
        box(1, 1, WIDTH - 2, HEIGHT - 2, "card", 12),
        *target(left, top), *context(right, top), *block(right, bottom), *verdict(left, bottom),
        arrow((left + 480, top + 153), (right - 2, top + 153)),
        arrow((right + 240, top + 270), (right + 240, bottom - 2)),
        arrow((right, bottom + 235), (left + 482, bottom + 235)),
        arrow((left + 240, bottom), (left + 240, top + 272)),
        say(left + 252, top + 292, "the same pass gives the next taps", "small soft"),
    ]  # fmt: skip
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    tip += '<path class="tip" d="M0 0 L8 4 L0 8 z"/></marker>'
    title = "<title>One round: target pass, taps, append, propose, verify</title>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    return "\n".join([head, title, f"<style>{STYLE}</style>", f"<defs>{tip}</defs>", *parts, "</svg>\n"])


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
