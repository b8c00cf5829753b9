"""What a layout prints is what it does: golden pictures of the published systems, and every sign from the matrix."""

import pytest
from expected_masks import CHAINS, PUBLISHED, matrix, random_layouts
from hypothesis import given, settings

from vola.model import layouts
from vola.model.layout import Blind, Block, Causal, Full, Layout, Self, TimeCausal

ALL = {name: layout for name, (layout, _) in PUBLISHED.items()} | CHAINS
FEW = settings(max_examples=40, deadline=None)

GOLDEN = {
    "pi0": """\
(rows = who looks)  image  text  state  action
image  x4             #     #      .      .
text   x3             #     #      .      .
state  x1             #     #      #      .
action x5             #     #      #      #
# all   . nothing""",
    "insulated": """\
(rows = who looks)  image  text  fast  action
image  x4             #     #     .      .
text   x3             #     #     .      .
fast   x3             #     #     \\      .
action x5             #     #     .      #
# all   . nothing   \\ up to its own place""",
    "octo with more readouts": """\
(rows = who looks)  task  observation  readout
task        x2       #         .          .
observation x6       #         ~          .
readout     x4       #         ~          ~
# all   . nothing   ~ up to its own time step""",
    "rt1 small": """\
(rows = who looks)  image0  action0  image1  action1
image0  x3            \\        .       .        .
action0 x2            #        .       .        .
image1  x3            #        #       \\        .
action1 x2            #        .       #        .
# all   . nothing   \\ up to its own place""",
    "decision_transformer": """\
(rows = who looks)  return  state  action
return x4             \\       <      <
state  x4             ~       \\      <
action x4             ~       ~      \\
\\ up to its own place   ~ up to its own time step   < before its own time step""",
    "selves": """\
(rows = who looks)  a  b
a x3                I  .
b x2                #  I
# all   . nothing   I itself only""",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_picture(name: str) -> None:
    assert ALL[name].picture() == GOLDEN[name]
    assert str(ALL[name]) == GOLDEN[name]


def test_token_picture() -> None:
    assert (
        layouts.rt1(2, 2, 1).picture(tokens=True)
        == """\
rows = who looks; columns: image0 x2 | action0 x1 | image1 x2 | action1 x1
image0  0  #. . .. .
image0  1  ## . .. .
action0 0  ## . .. .
image1  0  ## # #. .
image1  1  ## # ## .
action1 0  ## . ## ."""
    )


@pytest.mark.parametrize(
    ("inner", "sign"), [(Full(), "#"), (Causal(), "\\"), (Self(), "I"), (Blind(), "."), (TimeCausal(2), "~")]
)
def test_sign_of_every_inner_and_a_legend_of_no_other(inner: object, sign: str) -> None:
    lines = Layout((Block("a", 4, inner),)).picture().splitlines()
    assert lines[1].split() == ["a", "x4", sign]
    assert lines[2].startswith(f"{sign} ")
    assert "   " not in lines[2]


@given(random_layouts())
@FEW
def test_pictures_follow_from_the_matrix(layout: Layout) -> None:
    mask = matrix(layout)
    for line, row in zip(layout.picture(tokens=True).splitlines()[1:], mask, strict=True):
        assert line.split(maxsplit=2)[2].replace(" ", "") == "".join(".#"[int(x)] for x in row)
    _, *lines, legend = layout.picture().splitlines()
    explained = {x.split(" ", 1)[0] for x in legend.split("   ")}
    used = set()
    for line, a in zip(lines, layout.blocks, strict=True):
        name, length, *signs = line.split()
        assert (name, length) == (a.name, f"x{a.length}")
        used.update(signs)
        for sign, b in zip(signs, layout.blocks, strict=True):
            cell = mask[layout.slice(a.name), layout.slice(b.name)]
            assert (sign == "#") == cell.all()
            assert (sign == ".") == (not cell.any())
    assert used == explained


@given(random_layouts())
@FEW
def test_sentences_follow_from_the_matrix(layout: Layout) -> None:
    mask = matrix(layout)
    for sentence, a in zip(layout.explain().splitlines(), layout.names, strict=True):
        reads, readers, *indirect = sentence.removesuffix(".").split("; ")
        reads, readers = reads.removeprefix(f"{a} reads"), readers.split(" read", 1)[0]
        for b in layout.names:
            row, column = layout.slice(a), layout.slice(b)
            if b == a:
                assert ("itself" in reads.replace("itself only", "")) == mask[row, row].any()
                continue
            assert (b in reads) == mask[row, column].any()
            assert (b in readers) == mask[column, row].any()
            assert (b in "".join(indirect)) == (layout.reaches(a, b) and not mask[row, column].any())


def test_explain() -> None:
    assert (
        ALL["pi0"].explain()
        == """\
image reads text, itself; text, state, action read image.
text reads image, itself; image, state, action read text.
state reads image, text, itself; action reads state.
action reads image, text, state, itself; nothing reads action."""
    )
    assert ALL["rt1 small"].explain().splitlines()[1] == "action0 reads image0; image1 reads action0."
    assert ALL["rt1 small"].explain().splitlines()[3] == (
        "action1 reads image0, image1; nothing reads action1; action0 reaches it only through other blocks."
    )
    assert ALL["chain"].explain().splitlines()[0] == (
        "a reads b, itself; nothing reads a; c, d reach it only through other blocks."
    )
    assert ALL["octo with more readouts"].explain().splitlines()[2] == (
        "readout reads task, observation (up to its own time step), itself (up to its own time step); "
        "nothing reads readout."
    )
    assert Layout((Block("a", 1, Blind()),)).explain() == "a reads nothing; nothing reads a."
