"""The attribution ladder: it names the step that a planted kernel takes, leaves nothing of one that is declared, and
says what it cannot explain; its rows, table, figure and command."""

import pytest
import torch
from fakes import FakeKernel

from fused_swiglu import UNDECLARED, ArgumentError, Arithmetic, Problem, Weights, register, registry
from fused_swiglu.cli import main
from fused_swiglu.explain import explain, unexplained
from fused_swiglu.explain_plots import draw
from fused_swiglu.explain_tables import ladders, markdown
from fused_swiglu.inputs import make_inputs
from fused_swiglu.ladder import Models, hypotheses, ladder
from fused_swiglu.numerics import mismatch, ulp_distance
from fused_swiglu.plan import plan
from fused_swiglu.reference import exact, twin
from fused_swiglu.results import Environment, Row, load
from fused_swiglu.sm90 import accumulate, execute

CPU = torch.device("cpu")
SHAPE = Problem(48, 512, 896)
OPEN = (UNDECLARED, UNDECLARED)


@pytest.fixture(scope="module")
def inputs():
    return make_inputs(SHAPE, "normal", 1)


@pytest.fixture(scope="module")
def models(inputs):
    return Models(inputs.x, inputs.weights)


def flips(found):
    return {rung.name: rung.flipped for rung in found.rungs}


@pytest.mark.parametrize("rounds", [(), ("gate", "up"), ("gate", "up", "act")])
def test_a_complete_declaration_leaves_no_rest(inputs, models, rounds):
    declared = Arithmetic(rounds=rounds)
    found = models.ladder(execute(declared, inputs.x, inputs.weights), declared)
    assert (found.rest, found.tried, found.note) == (0, 1, None)
    assert str(found.hypothesis) == str(declared)
    assert [rung.name for rung in found.rungs] == ["chain", "recipe", *rounds, "rest"]


def test_each_step_flips_what_it_is_known_to(inputs, models):
    """NUMERICS: about 0.1% by the chain, 34% off after gate and up, 41% after act."""
    declared = Arithmetic(rounds=("gate", "up", "act"))
    found = models.ladder(execute(declared, inputs.x, inputs.weights), declared)
    share = flips(found)
    assert 0.0002 < share["chain"] < 0.003
    assert share["recipe"] < 0.0005
    off = {rung.name: rung.found.m1_gt0 for rung in found.rungs}
    assert 0.31 < off["up"] < 0.37
    assert 0.38 < off["act"] < 0.44
    assert all(share[name] > 0.15 for name in ("gate", "up", "act"))


def test_flips_and_distances_are_counted_from_models_made_anew(inputs, models):
    declared = Arithmetic(rounds=("gate",))
    x, weights = inputs.x, inputs.weights
    found = {rung.name: rung for rung in models.ladder(execute(declared, x, weights), declared).rungs}
    wanted = exact(x, weights, out_dtype=torch.bfloat16)
    before = execute(Arithmetic(), x, weights)
    assert found["gate"].flipped == float((ulp_distance(execute(declared, x, weights), before) > 0).double().mean())
    assert found["recipe"].found == mismatch(before, wanted)
    gate, up = (torch.from_numpy(accumulate(x, w)).double() for w in (weights.gate, weights.up))
    chain = (torch.nn.functional.silu(gate) * up).bfloat16()  # through fp32, which shows in next to no output
    assert found["chain"].flipped == pytest.approx(
        float((ulp_distance(chain, wanted.rounded) > 0).double().mean()), abs=1e-4
    )


@pytest.mark.parametrize("split", [2, 3])
def test_a_split_that_is_not_declared_is_found(inputs, models, split):
    out = execute(Arithmetic(split_k=split, rounds=("gate", "up")), inputs.x, inputs.weights)
    found = models.ladder(out, Arithmetic(*OPEN, ("gate", "up")))
    assert (found.hypothesis.accumulation, found.hypothesis.split_k, found.rest) == ("sm90", split, 0)
    assert 0 < flips(found)["order"] < 0.01
    assert found.tried > 1
    assert found.second is not None
    assert found.second[1] > 0


def test_a_recipe_that_is_not_declared_is_found(inputs, models):
    """Gates near 0 tell torch's silu from the recipe `ieee` where the output is fp32."""
    gate, up = (torch.from_numpy(accumulate(inputs.x, w)) for w in (inputs.weights.gate, inputs.weights.up))
    found = Models(inputs.x, inputs.weights).ladder(torch.nn.functional.silu(gate) * up, Arithmetic("sm90", UNDECLARED))
    assert (found.hypothesis.recipe, found.rest) == ("torch", 0)
    by_ieee = execute(Arithmetic(), inputs.x, inputs.weights, out_dtype=torch.float32)
    found = models.ladder(by_ieee, Arithmetic("sm90", UNDECLARED))
    assert (found.hypothesis.recipe, found.rest) == ("ieee", 0)


def test_a_rounding_that_is_not_declared_is_named(inputs, models):
    found = models.ladder(execute(Arithmetic(rounds=("gate",)), inputs.x, inputs.weights), Arithmetic())
    assert found.rest > 0.15
    assert found.otherwise is not None
    assert (str(found.otherwise[0]), found.otherwise[1]) == ("sm90:ieee:gate+out", 0)
    assert "sm90:ieee:gate+out leaves 0%" in str(found)


def test_what_nothing_explains_is_the_rest(inputs, models):
    """A dropped tail is no step of the ladder: no hypothesis is said to be the reason."""
    x, w = inputs.x[:, :-16], inputs.weights
    found = models.ladder(execute(Arithmetic(), x, Weights(w.gate[:, :-16], w.up[:, :-16])), Arithmetic())
    assert found.rest > 0.9
    assert found.otherwise is None


def test_fp32_sums_have_no_chain(inputs, models):
    rounds = ("gate", "up", "act")
    found = models.ladder(twin(inputs.x, inputs.weights), Arithmetic(*OPEN, rounds))
    assert str(found.hypothesis) == "fp32:torch:gate+up+act+out"
    assert "chain" not in flips(found)
    assert found.rest < 0.001


def test_sums_and_products_of_controls(inputs, models):
    gate, up = (torch.from_numpy(accumulate(inputs.x, w)) for w in (inputs.weights.gate, inputs.weights.up))
    sums = models.ladder(torch.cat((gate, up), 1).bfloat16(), Arithmetic(UNDECLARED, "none"), "gate_up")
    assert [rung.name for rung in sums.rungs] == ["chain", "rest"]
    product = models.ladder((gate * up).bfloat16(), Arithmetic(recipe="none"), "product")
    assert [rung.name for rung in product.rungs] == ["chain", "recipe", "rest"]
    assert (sums.rest, product.rest) == (0, 0)


def test_rows_of_an_output(inputs, models):
    rows = torch.tensor([0, 7, 47])
    out = execute(Arithmetic(), inputs.x, inputs.weights)
    out[1:7] = 0
    found = ladder(out, inputs.x, inputs.weights, Arithmetic(), rows=rows)
    assert (found.rest, found.rungs[-1].found.outputs) == (0, 3 * 512)
    assert models.ladder(out, Arithmetic()).rest == pytest.approx(6 / 48)


def test_biases_are_part_of_the_sums():
    problem = Problem(20, 64, 128, bias=True)
    given = make_inputs(problem, "normal", 3)
    out = execute(Arithmetic(rounds=("gate",)), given.x, given.weights)
    assert ladder(out, given.x, given.weights, Arithmetic(rounds=("gate",))).rest == 0


def test_what_is_open_is_tried_and_nothing_else():
    assert [str(h) for h in hypotheses(Arithmetic(), 896, "cuda")] == ["sm90:ieee:out"]
    on_gpu = hypotheses(Arithmetic(*OPEN), 192, "cuda")
    assert [h.split_k for h in on_gpu if h.recipe == "torch"] == [1, 2, 3, 1]  # three parts of 64 are all there are
    assert str(on_gpu[-1]) == "fp32:poly3:out"
    assert str(hypotheses(Arithmetic(*OPEN), 192, "cpu")[0]) == "fp32:torch:out"
    assert {h.rounds for h in hypotheses(Arithmetic(*OPEN, ("up",)), 192, "cpu")} == {("up",)}


def test_other_shapes_are_refused(inputs, models):
    with pytest.raises(ArgumentError, match=r"^out: has shape \(48, 511\)"):
        models.ladder(torch.zeros(48, 511).bfloat16(), Arithmetic())


# The study


def rows_of(*names, problem=SHAPE, **options):
    environment = Environment(run="r")
    return list(explain(plan([problem], names, device=CPU), device=CPU, environment=environment, **options))


@pytest.fixture
def planted():
    """Kernels that declare what they do, or not all, or something else."""
    before = dict(registry._registered)

    def add(name, does, declares):
        kernel = FakeKernel(
            name, lambda o: o.out.copy_(execute(does, o.x, o.weights)), arithmetics=lambda problem: (declares,)
        )
        return register(kernel)

    add("ladder.declared", Arithmetic(rounds=("gate",)), Arithmetic(rounds=("gate",)))
    add("ladder.open", Arithmetic(split_k=2, rounds=("gate",)), Arithmetic(*OPEN, ("gate",)))
    add("ladder.wrong", Arithmetic(rounds=("gate",)), Arithmetic())
    yield
    registry._registered.clear()
    registry._registered.update(before)


def test_a_row_for_each_rung(planted):
    rows = rows_of("ladder.*")
    by_kernel = {name: [row for row in rows if row.kernel == name] for name in dict.fromkeys(r.kernel for r in rows)}
    assert {name: [row.rung for row in mine] for name, mine in by_kernel.items()} == {
        "ladder.declared": ["chain", "recipe", "gate", "rest"],
        "ladder.open": ["chain", "order", "recipe", "gate", "rest"],
        "ladder.wrong": ["chain", "recipe", "rest"],
    }
    rests = {row.kernel: row for row in rows if row.rung == "rest"}
    assert (rests["ladder.declared"].flipped, rests["ladder.open"].flipped) == (0, 0)
    assert rests["ladder.open"].hypothesis in ("sm90*2:torch:gate+out", "sm90*2:ieee:gate+out")  # alike in bf16
    assert rests["ladder.open"].arithmetic == f"{UNDECLARED}:{UNDECLARED}:gate+out"
    assert "rounds elsewhere" in rests["ladder.wrong"].reason
    assert [row.kernel for row in rows if unexplained(row)] == ["ladder.wrong"]
    assert all(row.m0 is None for row in rows)  # no GPU ran
    assert all(row.run == "r" and row.outputs == 48 * 512 for row in rows)
    assert rests["ladder.declared"].m1_gt0 == by_kernel["ladder.declared"][2].m1_gt0 > 0.2


def test_a_sample_is_of_whole_rows(planted):
    rows = rows_of("ladder.declared", sample=1000)
    assert {row.outputs for row in rows} == {2 * 512}
    assert rows[-1].flipped == 0


def test_kernels_that_run_as_their_model_and_those_of_torch():
    rows = rows_of("cutlass.interleaved", "torch.eager", "cublas.gemm", problem=Problem(8, 64, 128))
    rests = {row.kernel: row for row in rows if row.rung == "rest"}
    assert (rests["cutlass.interleaved"].flipped, rests["cutlass.interleaved"].ran_on) == (0, "model")
    assert rests["torch.eager"].hypothesis.startswith("fp32:torch:")
    assert rests["torch.eager"].flipped < 0.01
    assert rests["cublas.gemm"].outputs == 8 * 128


def test_what_does_not_run_has_one_row(kernels):
    rows = rows_of("fake.raises", "fake.elsewhere", problem=Problem(4, 8, 16))
    assert {row.kernel: (row.status, row.rung) for row in rows} == {
        "fake.raises": ("failed", None),
        "fake.elsewhere": ("unsupported", None),
    }


def test_no_rows_of_x(planted):
    (row,) = rows_of("ladder.declared", problem=Problem(0, 8, 16))
    assert (row.status, row.rung, row.outputs) == ("ok", None, 0)


# Tables, figures, the command


def of_ladder(kernel="k", **changes):
    shares = {"chain": 0.001, "gate": 0.25, "rest": 0.0}
    return [
        Row(
            kernel=kernel, config="c", arithmetic="sm90:ieee:gate+out", m=1, n=2, k=3, status="ok", inputs="normal",
            ran_on="cpu", dtype="bf16", rung=rung, flipped=share, m1_gt0=share, m1_gt1=0.0, outputs=100,
            hypothesis="sm90:ieee:gate+out", **changes,
        )
        for rung, share in shares.items()
    ]  # fmt: skip


def test_a_line_for_each_ladder():
    lines = markdown([*of_ladder("b"), *of_ladder("a")]).splitlines()
    assert lines[0] == ("| inputs | k | m | kernel | explained as | chain | gate | rest | M1>0 | M1>1 | outputs |")
    assert lines[2] == "| normal | 3 | 1 | a | sm90:ieee:gate+out | 0.1% (0.1%) | 25% (25%) | 0% | 0% | 0% | 100 |"
    assert lines[3].startswith("| normal | 3 | 1 | b |")


def test_a_ladder_that_was_cut_off_is_left_out_and_the_last_of_several_counts():
    assert ladders(of_ladder()[:2]) == []
    twice = [*of_ladder(), *of_ladder(role="fused")]
    assert [ladder["rest"].role for ladder in ladders(twice)] == ["fused"]


def test_the_figure_has_a_bar_for_each_step():
    figure = draw([*of_ladder("a"), *of_ladder("b")])
    (ax,) = figure.axes
    assert len(ax.patches) == 6
    assert [text.get_text() for text in ax.texts][:3] == ["chain 0.1%", "gate 25%", "rest 0%"]
    with pytest.raises(ArgumentError, match="plot"):
        draw([])


def test_the_command_and_its_stored_rows(tmp_path, capsys, planted):
    out, figure = str(tmp_path / "rows.jsonl"), tmp_path / "ladder.svg"
    shape = ["--shape", "8,64,32", "--device", "cpu", "--quiet"]
    assert main(["explain", *shape, "--kernels", "ladder.declared", "--out", out, "--plot", str(figure)]) == 0
    assert figure.stat().st_size > 1000
    assert "ladder.declared" in capsys.readouterr().out
    assert main(["explain", *shape, "--kernels", "ladder.wrong", "--out", out]) == 1
    assert "ladder.wrong default contradicts sm90:ieee:out" in capsys.readouterr().err
    rows, environments = load(out)
    assert (len(rows), len(environments)) == (7, 2)
    assert main(["table", out, "--ladder"]) == 0
    table = capsys.readouterr().out
    assert main(["explain", "--from", out, "--markdown"]) == 1
    assert capsys.readouterr().out == table
    assert main(["explain", "--from", out, "--kernels", "ladder.declared"]) == 0
    assert main(["table", out, "--mismatch"]) == 0  # the kernel's rows, not its models'
    assert capsys.readouterr().out.count("| ladder.declared |") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--from", "FILE", "--out", "x"], "argument --out: given with --from"),
        (["--from", "FILE", "--kernels", "none"], "argument --from: holds no ladder"),
        (["--plot", "x.gif"], "argument --plot: cannot draw"),
    ],
)
def test_bad_options_are_one_line(options, message, tmp_path, capsys):
    stored = tmp_path / "rows.jsonl"
    stored.write_text("".join(f"{row.to_json()}\n" for row in of_ladder()))
    assert main(["explain", *[str(stored) if option == "FILE" else option for option in options]]) == 2
    assert message in capsys.readouterr().err
