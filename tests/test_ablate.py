"""ablate: a planted effect is found and none is not, pairs differ in one factor alone, and a killed run goes on."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from fused_swiglu import Problem, ablate, ablate_plots, ablate_tables, registry
from fused_swiglu.cli import main
from fused_swiglu.effects import BEST, EQUAL_TILE, Cell, Effect, answers, cells, effects
from fused_swiglu.errors import ArgumentError
from fused_swiglu.factors import ACTIVATION, FUSION, STAGES, TILE, Design, Variant
from fused_swiglu.intervals import FASTER, SAME, SLOWER, paired_ratio
from fused_swiglu.plan import plan
from fused_swiglu.results import Environment, Row, RowFile, load
from fused_swiglu.tables import CPU_NOTE

CPU = torch.device("cpu")
PINGPONG = "cutlass.pingpong"
OVERLAP = "bm=64,bn=128,stages=6,schedule=pingpong,cluster_m=2,cluster_n=1,band=8,swish=overlap"
HELD = OVERLAP.replace("overlap", "held")
NARROW = OVERLAP.replace("bn=128", "bn=96")  # makes overlap the commonest
EVT = "bm=64,bn=128,stages=0,schedule=pingpong,cluster_m=2,cluster_n=1,subtile=0,band=8"


def rows_of(
    times: dict[tuple[str, str] | tuple[str, str, str], float],
    run: str = "1",
    seed: int = 0,
    drift: float = 1.0,
    **more: object,
) -> list[Row]:
    """A group as a measurement gives it, of 24 rounds that drift together by 5%, with 0.3% of noise of each one's own.
    times: (kernel, config[, recipe]) -> microseconds; cublas.gemm, 100, is timed beside them."""
    generator = np.random.default_rng(seed)
    rounds = drift * generator.normal(1, 0.05, 24)
    samples = {
        (*key, "ieee")[:3]: time * rounds * generator.normal(1, 0.003, 24)
        for key, time in {**times, ("cublas.gemm", "default", "none"): 100.0}.items()
    }
    reference = samples["cublas.gemm", "default", "none"]
    usual = dict(m=64, n=32, k=16, status="ok", ran_on="NVIDIA H200", regime="burst", launch="graph", seed=0, run=run)
    usual |= dict(dtype="bf16", layout="stacked", inputs="normal", activation="silu", bias=False) | more
    return [
        Row(
            kernel=kernel,
            config=config,
            arithmetic=f"sm90:{'none' if _control(kernel) else recipe}:out",
            role="control" if _control(kernel) else "fused",
            time_us=float(np.median(taken)),
            rounds=tuple(taken),
            ratios={"cublas.gemm": paired_ratio(list(taken), list(reference))},
            **usual,  # type: ignore[arg-type]
        )
        for (kernel, config, recipe), taken in samples.items()
    ]


def _control(kernel: str) -> bool:
    return kernel.endswith((".product", ".gemm"))


def cell_of(rows: list[Row]) -> Cell:
    (cell,) = cells(rows)
    return cell


def only(rows: list[Row], factor: str) -> Effect:
    (effect,) = [effect for effect in effects(cell_of(rows)) if effect.factor == factor]
    return effect


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("factor", "wanted"), [(0.97, FASTER), (1.03, SLOWER), (1.0, SAME)])
def test_an_effect_of_3_percent_is_found_under_a_drift_of_5_and_none_is_not(seed: int, factor: float, wanted: str):
    rows = rows_of({(PINGPONG, HELD): 100 * factor, (PINGPONG, OVERLAP): 100.0, (PINGPONG, NARROW): 100.0}, seed=seed)
    effect = only(rows, "swish")
    assert (effect.level, effect.base, effect.kernel, effect.context) == ("held", "overlap", PINGPONG, "ieee")
    assert [pair.verdict for pair in effect.pairs] == [wanted]
    assert effect.middle == pytest.approx(factor, abs=0.005)
    assert effect.range[0] < effect.middle < effect.range[1]


def test_variants_timed_together_are_paired_round_by_round_and_others_through_the_reference():
    one, two = {(PINGPONG, OVERLAP): 100.0, (PINGPONG, NARROW): 100.0}, {(PINGPONG, HELD): 103.0}
    (paired,) = only(rows_of(one | two), "swish").pairs
    (apart,) = only(rows_of(one, run="1") + rows_of(two, run="2", seed=1, drift=1.2), "swish").pairs
    assert (paired.through, apart.through) == (None, "cublas.gemm")
    assert apart.ratio[0] == pytest.approx(1.03, abs=0.005)  # a drift of 20% between the runs is none of it
    assert apart.ratio[2] - apart.ratio[1] > paired.ratio[2] - paired.ratio[1]


def test_of_several_runs_the_last_that_timed_both_counts():
    times = {(PINGPONG, OVERLAP): 100.0, (PINGPONG, NARROW): 100.0, (PINGPONG, HELD): 110.0}
    later = rows_of(times | {(PINGPONG, HELD): 120.0}, run="2")
    alone = rows_of({(PINGPONG, HELD): 50.0}, run="3")
    (pair,) = only([*rows_of(times), *later, *alone], "swish").pairs
    assert pair.ratio[0] == pytest.approx(1.2, abs=0.01)
    assert pair.through is None


def test_other_problems_regimes_and_devices_are_not_compared():
    one, two = {(PINGPONG, OVERLAP): 100.0}, {(PINGPONG, HELD): 103.0}
    for other in ({"m": 128}, {"regime": "sustained"}, {"ran_on": "NVIDIA H100"}, {"inputs": "wide"}, {"seed": 1}):
        rows = rows_of(one) + [replace(row, **other) for row in rows_of(two)]
        assert not [effect for cell in cells(rows) for effect in effects(cell)]


def test_times_on_a_cpu_have_no_verdict():
    rows = rows_of({(PINGPONG, OVERLAP): 100.0, (PINGPONG, HELD): 150.0}, ran_on="model")
    effect = only(rows, "swish")
    assert effect.pairs[0].verdict is None
    assert [effect.count(verdict) for verdict in (FASTER, SLOWER, SAME)] == [0, 0, 0]
    assert "no result" in ablate_tables.notes(rows)[0]


def test_several_pairs_are_summed_up_by_their_median_their_range_and_their_verdicts():
    times = {}
    for tile, held in (("64x96", 97.0), ("64x128", 100.0), ("64x192", 110.0)):
        for config, time in ((OVERLAP, 100.0), (HELD, held)):
            times[PINGPONG, config.replace("bn=128", f"bn={tile[3:]}")] = time
    times[PINGPONG, NARROW.replace("bn=96", "bn=64")] = 100.0
    effect = only(rows_of(times), "swish")
    assert len(effect.pairs) == 3
    assert effect.middle == pytest.approx(1.0, abs=0.004)
    assert effect.range == pytest.approx((0.97, 1.10), abs=0.006)
    assert [effect.count(verdict) for verdict in (FASTER, SLOWER, SAME)] == [1, 1, 1]


def test_levels_are_compared_with_the_commonest_unless_each_other_is_asked_for():
    bands = {("cutlass.evt", EVT.replace("band=8", f"band={band}")): 100.0 + band for band in (1, 4, 8, 16)}
    wide = {("cutlass.evt", EVT.replace("bn=128", "bn=64")): 90.0}
    cell = cell_of(rows_of(bands | wide))
    found = [(e.level, e.base) for e in effects(cell) if e.factor == "band"]
    assert found == [("1", "8"), ("4", "8"), ("16", "8")]
    assert len([e for e in effects(cell, every=True) if e.factor == "band"]) == 6


def test_recipes_are_compared_and_no_other_factor_across_them():
    times = {(PINGPONG, c, r): 100.0 for c in (OVERLAP, HELD) for r in ("ieee", "ex2")}
    found = Counter((e.factor, e.context, len(e.pairs)) for e in effects(cell_of(rows_of(times))))
    assert found == {("swish", "ieee", 1): 1, ("swish", "ex2", 1): 1, ("recipe", "", 2): 1}


def test_the_activation_costs_the_kernel_over_its_control():
    times = {("cutlass.evt", EVT): 105.0, ("cutlass.evt.product", EVT): 100.0, ("cutlass.evt", EVT, "ex2"): 101.0}
    found = [e for e in effects(cell_of(rows_of(times))) if e.factor == ACTIVATION]
    assert [(e.kernel, e.level, e.base) for e in found] == [
        ("cutlass.evt", "on (ex2)", "off"),
        ("cutlass.evt", "on (ieee)", "off"),
    ]
    assert found[1].middle == pytest.approx(1.05, abs=0.005)


def test_between_kernels_a_kernels_own_fields_belong_to_the_level():
    times = {(PINGPONG, OVERLAP): 104.0, (PINGPONG, HELD): 110.0, ("cutlass.evt", EVT): 100.0}
    found = {e.level: e.middle for e in effects(cell_of(rows_of(times))) if e.factor == FUSION}
    assert found == {
        "cutlass.pingpong swish=overlap": pytest.approx(1.04, abs=0.005),
        "cutlass.pingpong swish=held": pytest.approx(1.10, abs=0.005),
    }
    other = {(PINGPONG, OVERLAP.replace("cluster_m=2", "cluster_m=1")): 104.0, ("cutlass.evt", EVT): 100.0}
    assert not effects(cell_of(rows_of(other)))


def test_stages_follow_the_tile_unless_they_are_fewer_than_fit():
    wide, few = OVERLAP.replace("bn=128,stages=6", "bn=192,stages=4"), OVERLAP.replace("stages=6", "stages=3")
    found = effects(cell_of(rows_of({(PINGPONG, config): 100.0 for config in (OVERLAP, wide, few)})))
    assert [(e.factor, e.level, e.base) for e in found] == [(TILE, "64x192", "64x128"), (STAGES, "6", "3")]


def _every_variant() -> list[Variant]:
    problem = Problem(64, 64, 64)
    names = [name for name in registry.kernel_names() if name.startswith(("cutlass.", "triton.", "torch."))]
    return [
        Variant.of(name, kernel.role, config, arithmetic)
        for name, kernel in ((name, registry.get_kernel(name)) for name in names)
        for config in kernel.configs(problem)
        for arithmetic in kernel.arithmetics(problem)
    ]


def _fields(variant: Variant) -> dict[str, str]:
    return dict(pair.split("=") for pair in variant.config.split(",") if "=" in pair)


def test_of_all_kernels_every_pair_differs_in_one_factor_alone():
    """Held against the configs' fields, which the levels are made of."""
    design = Design(_every_variant())
    together = {
        "tile": {"bm", "bn", "stages"},
        "passes": {"passes", "stages"},
        "bk": {"bk", "stages"},
        "cluster": {"cluster_m", "cluster_n"},
        "activation": set(),
        "recipe": set(),
    }
    seen: Counter[str] = Counter()
    for a, b in combinations(design.variants, 2):
        factor = design.factor(a, b)
        assert design.factor(b, a) == factor
        if factor is None:
            continue
        seen[factor] += 1
        one, other = _fields(a), _fields(b)
        changed = {name for name in one.keys() & other.keys() if one[name] != other[name]}
        names = a.kernel.removesuffix(".product"), b.kernel.removesuffix(".product")
        assert (names[0] != names[1]) == (factor == FUSION)
        assert (a.kernel != b.kernel) == (factor in (FUSION, ACTIVATION))
        if factor == FUSION:
            assert changed <= {"stages"}
        else:
            assert one.keys() == other.keys()
            assert changed <= together.get(factor, {factor})
        assert (a.arithmetic == b.arithmetic) or factor in ("recipe", "rounds", ACTIVATION)
    assert {"fusion", "swish", "cluster", "schedule", "recipe", "activation", "tile", "passes"} <= seen.keys()


def test_the_headline_takes_equal_tiles_of_equal_clusters_first_and_each_ones_best():
    single = EVT.replace("cluster_m=2", "cluster_m=1")
    small, small_evt = OVERLAP.replace("bn=128", "bn=64"), single.replace("bn=128", "bn=64")
    times = {(PINGPONG, OVERLAP): 97.0, (PINGPONG, HELD): 80.0, (PINGPONG, small): 96.0}
    times |= {("cutlass.evt", EVT): 100.0, ("cutlass.evt", single): 110.0, ("cutlass.evt", small_evt): 98.0}
    found = answers(cell_of(rows_of(times)))
    assert [(a.question, a.matched, a.variant.config, a.other.config) for a in found] == [
        (EQUAL_TILE, False, small, small_evt),
        (EQUAL_TILE, True, OVERLAP, EVT),
        (BEST, False, small, small_evt),
    ]
    assert found[1].pair.ratio[0] == pytest.approx(0.97, abs=0.005)
    assert found[1].pair.verdict == FASTER


def test_the_best_is_chosen_by_the_first_look_and_judged_by_the_last():
    lucky = OVERLAP.replace("bn=128", "bn=96")
    first = rows_of({(PINGPONG, OVERLAP): 95.0, (PINGPONG, lucky): 90.0, ("cutlass.evt", EVT): 100.0})
    again = rows_of({(PINGPONG, lucky): 99.9, ("cutlass.evt", EVT): 100.0}, run="2", seed=1)
    (best,) = [a for a in answers(cell_of([*first, *again])) if a.question == BEST]
    assert best.variant.config == lucky
    assert best.pair.verdict == SAME


def test_groups_keep_a_tile_together_hold_each_variant_once_and_no_more_than_asked_for():
    work = plan(Problem(64, 64, 64), ["cutlass.*"], ["*"], device=CPU)
    (space,) = ablate.design(work, device=CPU, vary=[("band", ["1", "16"])], group=32)
    keys = [candidate.key for group in space.groups for candidate in group]
    assert len(keys) == len(set(keys)) >= 48
    assert {candidate.key for candidate in work[0][1]} <= set(keys)
    assert max(map(len, space.groups)) <= 32
    assert {"cublas.gemm", "torch.eager"} <= {c.name for c in space.references}
    homes: dict[str, set[int]] = {}
    sizes: Counter[str] = Counter()
    for number, group in enumerate(space.groups):
        for candidate in group:
            tile = ablate.variant_of(candidate).levels[TILE]
            homes.setdefault(tile, set()).add(number)
            sizes[tile] += 1
    assert all(len(groups) == 1 for tile, groups in homes.items() if sizes[tile] <= 32)
    assert len(space.groups) <= 1 + len(keys) // 16
    assert any("band=16" in key for key in keys)
    assert any("sm90:ex2:out" in key for key in keys)


def test_a_field_or_value_that_no_config_has_is_named():
    work = plan(Problem(64, 64, 64), ["cutlass.evt"], ["*"], device=CPU)
    for vary, remedy in ((("warps", ["4"]), "choose from"), (("band", ["wide"]), "give an int")):
        with pytest.raises(ArgumentError, match=f"^vary: .*{remedy}"):
            ablate.design(work, device=CPU, vary=[vary])
    with pytest.raises(ArgumentError, match=r"^group: 0"):
        ablate.design(work, device=CPU, group=0)


TINY = ["ablate", "--shape", "8,32,16", "--device", "cpu", "--quiet", "--group", "2"]
FAKES = [*TINY, "--kernels", "tiled.good", "fake.elsewhere"]


def timed_groups(monkeypatch: pytest.MonkeyPatch, killed_at: int | None = None) -> list[list[str]]:
    """What each group that is timed from now on holds, beside the references; of one, timing is interrupted."""
    seen: list[list[str]] = []
    real = ablate.compare.run

    def run(work, **options):
        seen.append([c.key for c in work[0][1] if c.name not in ("cublas.gemm", "torch.eager", "quack.gated")])
        if len(seen) - 1 == killed_at:
            raise KeyboardInterrupt
        return real(work, **options)

    monkeypatch.setattr(ablate.compare, "run", run)
    return seen


@pytest.mark.usefixtures("kernels")
def test_a_killed_run_goes_on_where_it_was_and_a_whole_one_times_nothing(tmp_path, monkeypatch, capsys):
    path = str(tmp_path / "rows.jsonl")
    with monkeypatch.context() as patched:
        first = timed_groups(patched, killed_at=1)
        assert main([*FAKES, "--out", path]) == 130
    assert "start it again to go on" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        second = timed_groups(patched)
        assert main([*FAKES, "--out", path]) == 0
    with monkeypatch.context() as patched:
        third = timed_groups(patched)
        assert main([*FAKES, "--out", path]) == 0
    assert len(first) == 2
    assert second[0] == first[1]
    assert sorted(first[0] + second[0]) == sorted(
        f"tiled.good|tile={tile},fast={fast}|sm90:{recipe}:out"
        for tile, fast, recipe in ((64, "no", "ieee"), (64, "no", "ex2"), (128, "no", "ieee"), (128, "yes", "ieee"))
    )
    assert third == []
    rows, environments = load(path)
    assert {row.run for row in rows} <= {environment.run for environment in environments}
    assert len({environment.run for environment in environments}) == len(environments)
    assert [row.status for row in rows if row.kernel == "fake.elsewhere"] == ["unsupported"]
    for run in {row.run for row in rows if row.time_us}:
        assert {"cublas.gemm", "torch.eager"} <= {row.kernel for row in rows if row.run == run}
    assert main(["ablate", "--from", path]) == 0


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("changed", ["driver", "torch", "revision", "torn"])
def test_a_group_of_another_environment_or_with_a_row_missing_is_timed_again(tmp_path, monkeypatch, changed):
    path = tmp_path / "rows.jsonl"
    assert main([*FAKES, "--out", str(path)]) == 0
    rows, environments = load(path)
    if changed == "torn":
        groups = [row.run for row in rows if row.kernel == "tiled.good"]
        rows.remove(next(row for row in rows if row.run == groups[0]))
    else:
        environments = [replace(environment, **{changed: "other"}) for environment in environments]
    path.unlink()
    with RowFile(path) as file:
        for record in (*environments, *rows):
            file.write(record)
    seen = timed_groups(monkeypatch)
    assert main([*FAKES, "--out", str(path)]) == 0
    assert len(seen) == (1 if changed == "torn" else 3)  # the third has the best of either recipe


@pytest.mark.usefixtures("kernels")
def test_a_kernel_that_fails_is_a_row_and_the_others_are_timed(tmp_path, capsys):
    path = str(tmp_path / "rows.jsonl")
    assert main([*TINY, "--kernels", "fake.raises", "tiled.good", "--out", path]) == 1
    rows, _ = load(path)
    assert {(row.kernel, row.status) for row in rows} >= {("fake.raises", "failed"), ("tiled.good", "ok")}
    out = capsys.readouterr().out
    assert "illegal memory access" in out
    assert CPU_NOTE in out
    assert "no result" not in out.replace(CPU_NOTE, "").partition("Effects")[0]


def study(tmp_path) -> str:
    path = tmp_path / "study.jsonl"
    times = {(PINGPONG, OVERLAP): 97.0, (PINGPONG, HELD): 100.0, (PINGPONG, NARROW): 99.0, ("cutlass.evt", EVT): 100.0}
    with RowFile(path) as file:
        file.write(Environment(run="1"))
        for row in rows_of(times):
            file.write(row)
    return str(path)


def test_stored_rows_give_tables_and_figures_without_a_gpu(tmp_path, capsys):
    path, figures = study(tmp_path), tmp_path / "figures"
    assert main(["ablate", "--from", path, "--plot", str(figures)]) == 0
    out = capsys.readouterr().out
    assert "Pingpong overlap against EVT (bf16, stacked weights, normal inputs, burst, NVIDIA H200)" in out
    assert CPU_NOTE not in out
    assert {file.name for file in figures.iterdir()} == {"headline.png", "fusion.png", "swish.png", "tile.png"}
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in figures.iterdir())
    assert main(["ablate", "--from", path, "--markdown", "--factor", "headline"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| k | n | m | recipe | at |")
    assert len(lines) == 4
    assert all(line.endswith("| faster |") and "64x128 c2x1" in line for line in lines[2:])
    assert main(["ablate", "--from", path, "--markdown", "--factor", "swish"]) == 0
    (line,) = capsys.readouterr().out.splitlines()[2:]
    assert line.startswith("| 16 | 32 | 64 | swish | cutlass.pingpong | ieee | held | overlap | 1.03")
    assert line.endswith("| 1 | 0 | 1 | 0 | 0 |")


def test_a_figure_shows_ratios_intervals_and_units():
    rows = rows_of({(PINGPONG, OVERLAP): 100.0, (PINGPONG, NARROW): 99.0, (PINGPONG, HELD): 103.0})
    rows += [replace(row, m=128) for row in rows]
    figure = ablate_plots.draw(rows, "swish")
    assert figure is not None
    assert [ax.get_title().partition(",")[0] for ax in figure.axes] == ["m=64", "m=128"]
    assert "dimensionless" in figure.axes[-1].get_xlabel()
    (label,) = figure.axes[0].get_yticklabels()
    assert "held / overlap" in label.get_text()
    assert ablate_plots.draw(rows, "cluster") is None


@pytest.mark.parametrize(
    ("options", "argument", "remedy"),
    [
        ("--from {study} --out {folder}/other.jsonl", "out", "leave one of them out"),
        ("--from {folder}/none.jsonl", "FILE", "check the path"),
        ("--from {lonely}", "from", "ablate --out"),
        ("--from {study} --factor tide", "factor", "choose from fusion, headline, swish, tile"),
        ("--from {study} --plot {study}", "plot", "give a folder"),
        ("--device cpu --factor tide", "factor", "choose from"),
        ("--device cpu --vary band", "vary", "such as band=1,4,16"),
        ("--device cpu --vary warps=4", "vary", "choose from"),
        ("--device cpu --vary band=wide", "vary", "give an int"),
        ("--device cpu --group 0", "group", "give 1 or more"),
        ("--device cpu --group 1,2", "group", "give one integer"),
        ("--device cpu --regime steady", "regime", "choose from burst, sustained"),
        ("--device cpu --config bm=1000,*", "config", "choose the kernel"),
        ("--device cpu --plot {study}", "plot", "give a folder"),
        ("--device cpu --plot=", "plot", "give it a value"),
    ],
)
def test_bad_input_is_one_line_before_any_work(options, argument, remedy, tmp_path, capsys, monkeypatch):
    lonely = tmp_path / "lonely.jsonl"
    with RowFile(lonely) as file:
        file.write(rows_of({("cutlass.evt", EVT): 100.0})[0])
    given = options.format(study=study(tmp_path), folder=tmp_path, lonely=lonely).split()
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr("fused_swiglu.ablate.run", None)
    assert main(["ablate", *given]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert ("argument FILE" if argument == "FILE" else f"argument --{argument}") in err
    assert remedy in err
    assert sorted(tmp_path.iterdir()) == before
