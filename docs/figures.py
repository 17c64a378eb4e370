"""The page of measured figures, written from `benchmarks/results` whenever the site is built."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from shardweave.docs.figure_tables import Rows, results, section, table
from shardweave.docs.planning_figures import measured_choice, planning, planning_speed


def median_s(row: dict[str, Any]) -> float:
    return statistics.median(row["times_s"])


def _ratio(ours: dict[str, Any], peer: dict[str, Any], key: str = "") -> str:
    if not key:
        return f"{median_s(ours) / median_s(peer):.2f}"
    return f"{ours[key] / peer[key]:.2f}" if peer[key] else ""


def training() -> list[str]:
    slow = {case["case"]: case["rows"] for case in results("training_1gbit")["cases"]}

    def rows() -> Rows:
        for case in results("training")["cases"]:
            ours, *peers = case["rows"]
            rest = slow.get(case["case"])
            shaped = _ratio(rest[0], rest[1]) if rest else ""
            for peer in peers:
                yield (
                    case["case"], peer["name"], _ratio(ours, peer),
                    _ratio(ours, peer, "peak_bytes"), _ratio(ours, peer, "sent_bytes"), shaped,
                )  # fmt: skip

    return section(
        "Steps beside PyTorch's own",
        "training.py",
        "training.json, training_1gbit.json (links of 1 Gbit/s), and second runs: training_2.json, "
        "training_1gbit_2.json",
        "A step (forward and backward) beside PyTorch's own parallelism: a GPT of 4 layers, hidden "
        "256 (small: 32), on the same processes, in turn, medians of 20 steps. Each figure is ours "
        "divided by the other's; below 1 is less. A 2-core x86-64 CPU, gloo, torch 2.13.",
        table("case | beside | time | memory | bytes sent | time, links of 1 Gbit/s", rows()),
    )


def small_steps() -> list[str]:
    def rows() -> Rows:
        for where, (eager, ours) in results("small_steps")["rows"].items():
            yield where, f"{statistics.median(ours) / statistics.median(eager):.2f}"

    return section(
        "A small step",
        "small_steps.py",
        "small_steps.json",
        'Hidden 32 on one process, where most time is Python\'s; with `backward="in_call"`, '
        "divided by eager's time.",
        table("the step is timed | time", rows()),
    )


def schedules_of(name: str) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Our rows of a result on pipelines, each with PyTorch's of the same order if it has one."""
    (result,) = results(name)["results"]
    return [
        (row, after if after["name"].startswith("torch") else None)
        for row, after in pairwise([*result["rows"], {"name": ""}])
        if row["name"].startswith("shardweave")
    ]


def pipelines() -> list[str]:
    def rows(name: str) -> Rows:
        for row, peer in schedules_of(name):
            yield (
                row["name"].split()[1],
                f"{median_s(row) * 1e3:.0f} ms",
                _ratio(row, peer) if peer else "",
                f"{row['peak_bytes'] / 2**20:.0f} MiB",
                _ratio(row, peer, "peak_bytes") if peer else "",
                f"{row['simulated_s'] * 1e3:.0f} ms",
                f"{statistics.median(row['waited_s']) / median_s(row):.0%}",
                f"{row['simulated_wait_s'] / row['simulated_s']:.0%}",
            )

    heads = (
        "schedule | time | of PyTorch's | memory | of PyTorch's | simulated time | waits | "
        "waits, simulated"
    )
    return section(
        "Pipelines beside PyTorch's own",
        "pipelines.py --rate 500mbit --profile FOLDER",
        "pipelines.json (2 processes), pipelines_4.json (4, each held to 1/2.5 of a core)",
        "Each schedule beside that of `torch.distributed.pipelining`: a GPT of 8 layers, hidden "
        "256, 8 micro-batches of 2 x 64 tokens, medians of 20 steps. Waits are those of the rank "
        "that waits least.",
        table(heads, rows("pipelines")),
        table(heads, rows("pipelines_4")),
    )


def mixed_speeds() -> list[str]:
    def rows() -> Rows:
        for row in results("mixed_speeds")["rows"]:
            simulated = f"{row['simulated_s']:.2f} s"
            yield row["name"], f"{median_s(row):.2f} s", simulated, str(row["micro_batches"])

    return section(
        "Devices of different speeds",
        "mixed_speeds.py",
        "mixed_speeds.json",
        "Two of four processes have half the processor time of the others: plans that know of it "
        "beside plans that do not, a GPT of 16 layers, medians of 10 steps.",
        table("plan | measured | simulated | micro-batches", rows()),
    )


def zero() -> list[str]:
    def rows() -> Rows:
        by_ranks = results("zero")["results"]
        for stage in (1, 2, 3):
            pairs = [
                [row for row in result["rows"] if f"ZeRO {stage}" in row["name"]]
                for result in by_ranks
            ]
            sent = _ratio(pairs[-1][0], pairs[-1][1], "sent_bytes")
            yield f"ZeRO {stage}", *(_ratio(pair[0], pair[1]) for pair in pairs), sent

    return section(
        "ZeRO beside FSDP2",
        "zero.py",
        "zero.json",
        "A GPT of 4 layers in 4 micro-batches with AdamW's state in shards (ZeRO 1), gradients too "
        "(2) and parameters too (3), divided by FSDP2 in the equal setting; medians of 10 steps.",
        table("stage | time, 2 processes | 4 processes | bytes sent, 4 processes", rows()),
    )


def overlap() -> list[str]:
    def rows() -> Rows:
        for row in results("overlap")["rows"]:
            simulated = row.get("simulated_s")
            yield (
                row["name"],
                f"{row['time_s'] * 1e3:.0f} ms",
                f"{row['speedup']:.2f}",
                str(row["collectives"] or ""),
                f"{simulated * 1e3:.0f} ms" if simulated else "",
                f"{row['time_s'] / row['lower_bound_s']:.2f}" if simulated else "",
            )

    def context() -> Rows:
        for row in results("context")["rows"]:
            simulated = f"{row['simulated_s'] * 1e3:.0f} ms"
            yield row["name"], f"{row['time_s'] * 1e3:.0f} ms", f"{row['speedup']:.2f}", simulated

    return section(
        "Orders that hide communication",
        "overlap.py --profile overlap_cluster.yaml` and `context.py",
        "overlap.json, context.json",
        "Tensor parallelism on two processes over a link that the kernel limits to 410 Mbit/s: six "
        "layers of hidden 512, batch 8, medians of five steps; and sequences of 2,048 tokens "
        "sharded over two processes, with attention in parts.",
        table("order | measured | speed-up | messages | simulated | of the lower bound", rows()),
        table("order, long sequences | measured | speed-up | simulated", context()),
    )


def loss_chunks() -> list[str]:
    def rows() -> Rows:
        for row in results("loss_chunks"):
            saved = f"{row['saved_of_logits']:.0%}" if row["chunks"] > 1 else ""
            memory = f"{row['held_bytes'] / 2**20:,.0f} MiB"
            yield str(row["chunks"]), memory, saved, f"{row['time']:.2f}"

    return section(
        "The loss in chunks",
        "loss_chunks.py",
        "loss_chunks.json",
        "One device's step of a GPT (8 layers, hidden 256, vocabulary 50,257, 8 x 512 tokens, "
        "float32) on the reference backend. Saved is the share of logits and their gradients.",
        table("chunks | memory | saved | processor time", rows()),
    )


def precision() -> list[str]:
    rows: dict[str, list[str]] = {}
    for row in results("precision")["rows"]:
        rows.setdefault(row["mesh"], []).append(f"{row['mean']:.3f}")
    return section(
        "Gradients in bfloat16",
        "precision.py",
        "precision.json",
        "How far gradients of a small GPT are from those in float64, over the distance of eager "
        "autocast: geometric means over 40 seeds, on virtual meshes, by `reduce_dtype`.",
        table("mesh | as they are | `torch.float32` | `torch.bfloat16`", rows_of(rows)),
    )


def rows_of(cells: dict[str, list[str]]) -> Rows:
    return ([name, *values] for name, values in cells.items())


def losses() -> list[str]:
    from shardweave.benchmarks.loss_curve import distance

    def rows() -> Rows:
        for name, what in (("loss_curve", "none"), ("loss_curve_dropout", "0.05, seeded")):
            curves = results(name)["losses"]
            for run in curves:
                if run != "eager":
                    yield run, what, str(len(curves[run])), f"{distance(curves, run)[0]:.4f}"

    kills = results("kills")
    said = (
        f"In `kills.py` one of four processes is killed {len(kills['kills'])} times in "
        f"{kills['steps']} steps; the final loss is {kills['final_loss']}, and "
        f"{kills['final_loss_left_alone']} when left alone."
    )
    return section(
        "Losses of sharded training",
        "loss_curve.py` and `kills.py",
        "loss_curve.json, loss_curve_dropout.json, kills.json",
        "How far losses (nats per byte) are from eager's on one process, on average over the "
        "steps: sharded over four processes, killed twice and resumed on other meshes, and eager "
        f"in four micro-batches, which differs by rounding. {said}",
        table("run | dropout | steps | mean distance from eager", rows()),
    )


def compile_row(run: dict[str, Any]) -> list[str]:
    """The cells of a depth in the table of compile times."""
    stages = {stage["name"]: stage["seconds"] for stage in run["stages"]}
    peak = max(stage["peak_gib"] for stage in run["stages"] if stage["name"] == "parse")
    return [
        f"{run['layers']}", f"{run['parameters'] / 1e9:.1f}e9", f"{run['local_ops']:,}",
        f"{stages['capture']:.1f} s", f"{run['passes_s']:.1f} s",
        f"{stages['print'] + stages['parse']:.1f} s", f"{peak:.2f} GiB",
    ]  # fmt: skip


def compile_time() -> list[str]:
    heads = "layers | parameters | ops per rank | capture | all passes | print and parse | memory"
    staged, llama = results("compile_time_staged"), results("compile_time_llama")
    run = staged["runs"][-1]
    took_s = sum(stage["seconds"] for stage in run["stages"])
    text = (
        "GPT-3's shape (hidden 12288, 96 heads, 2048 tokens) with the `megatron` plan on "
        f"`tensor=8,data=128`, weights never allocated. Sharded into stages on `{staged['mesh']}`, "
        f"with 64 micro-batches, {run['layers']} layers take {took_s:.0f} s from the import of "
        "torch to a scheduled, verified and simulated program, whose text has "
        f"{run['text_bytes'] / 1e6:.1f} MB. The second table is Llama-3-8B's shape."
    )
    return section(
        "What it costs to compile",
        "compile_time.py",
        "compile_time.json, compile_time_llama.json, compile_time_staged.json",
        f"{text} {staged['machine']}; processor time.",
        table(heads, map(compile_row, results("compile_time")["runs"])),
        table(heads, map(compile_row, llama["runs"])),
    )


def explore_page() -> list[str]:
    def rows() -> Rows:
        for row in results("explore_page")["rows"]:
            size = f"{row['page_bytes'] / 1e6:.1f} MB"
            yield row["name"], f"{row['num_ops']:,}", size, f"{row['opens_s']:.1f} s"

    return section(
        "Pages of the explorer",
        "explore_page.py",
        "explore_page.json",
        "The size of pages of `shardweave explore`, and how long Chromium takes to show them.",
        table("program | ops of a rank | page | opens in", rows()),
    )


def models() -> list[str]:
    from shardweave.benchmarks.models import page

    return section(
        "Models that are exact",
        "models.py",
        "models.json",
        "Loss, gradients and buffers beside eager PyTorch in float64, on six configurations.",
        [*page(results("models")["rows"]).splitlines(), ""],
    )


def on_a_gpu() -> list[str]:
    result = results("gpu_exact")
    machine = result["machine"]

    def rows() -> Rows:
        for row in result["rows"]:
            numbers = [f"{row[key]:.1e}" if key in row else "" for key in ("error", "eager_error")]
            yield row["check"], *numbers, "yes" if row["ok"] else row.get("failed", "no")

    return section(
        "On a GPU",
        "gpu_exact.py",
        "gpu_exact.json",
        "Loss and gradients of a compiled step, relative to eager's in float64 on that GPU; three "
        "times eager's own error is allowed. Of each row the JSON names the commit. "
        f"{machine['device']}, torch {machine['torch']}, Triton {machine['triton']}.",
        table("step | error | eager's error | within three times", rows()),
    )


def proofs() -> list[str]:
    from shardweave.benchmarks.proof_mutants import sentences
    from shardweave.benchmarks.proofs import sentence

    said = f"{sentence(results('proofs'))} {sentences(results('proof_mutants'))}"
    return section(
        "Proofs", "proofs.py` and `proof_mutants.py", "proofs.json, proof_mutants.json", said
    )


_SIDES = ("ours", "inductor", "bound", "generated")


def kernel_row(row: dict[str, Any], goals: dict[str, float]) -> list[str]:
    """The cells of a program in the table of launches and bytes."""
    cells = [row["model"], row["dtype"], row["mesh"], row["part"]]
    verdicts: list[str] = []
    for key, word, scale in (("launches", "launches", 1), ("moved_bytes", "bytes", 2**20)):
        ours, inductor, bound, generated = (row[side][key] for side in _SIDES)
        cells += [f"{ours / scale:.0f}", f"{inductor / scale:.0f}"]
        cells += [f"{ours / inductor:.2f}", f"{bound / inductor:.2f}"]
        goal = goals[key] * inductor
        verdicts.append(
            f"{word} {'met' if ours <= goal else 'missed' if bound <= goal else 'out of reach'}"
        )
    return [*cells, f"{generated / scale:.0f}", ", ".join(verdicts)]


def kernels() -> list[str]:
    counted, built = results("kernel_bytes"), results("kernel_builds")["rows"]

    def builds() -> Rows:
        for target in dict.fromkeys(row["target"] for row in built):
            own = [row for row in built if row["target"] == target]
            yield (
                target,
                str(len(own)),
                str(sum(row["spilled_bytes"] > 0 for row in own)),
                str(sum(bool(row["narrow"]) for row in own)),
                str(max(row["registers"] for row in own)),
                f"{statistics.median_high(row['occupancy'] or 0 for row in own):.0%}",
            )

    return section(
        "Kernels",
        "kernel_bytes.py` and `kernel_builds.py",
        "kernel_bytes.json, kernel_builds.json",
        "Launches and bytes of a layer and of a head, forward and backward, beside Inductor's "
        "Triton scheduling of the same program: hidden 1024, 8,192 tokens. Goals are "
        f"{counted['goals']['launches']:.2f} of the launches and "
        f"{counted['goals']['moved_bytes']:.2f} of the bytes; a bound is what no fusion can go "
        "below with the same library calls (`kernel_bounds.py`). Then kernels compiled for chips "
        "that need not be there.",
        table(
            "model | dtype | mesh | part | launches | Inductor's | ratio | bound | MiB | "
            "Inductor's | ratio | bound | generated products, MiB | goals",
            (kernel_row(row, counted["goals"]) for row in counted["rows"]),
        ),
        table(
            "chip | kernels | that spill | of less than 128 bits | registers, most | occupancy, "
            "median",
            builds(),
        ),
    )


_SOURCES = {
    "vtrain_single": "GPT on 2 to 8 A100",
    "llm_foundry": "8 to 512 A100 and H100",
    "dlperf_gpt": "1 to 32 V100",
    "korthikanti_tab5": "8 to 512 A100",
    "sailor_clariden_gh200": "4 to 256 GH200",
    "torchtitan": "Llama on 8 to 512 A100, H100, H200",
    "fms_fsdp": "Llama on 96 and 128 A100, H100",
    "internevo": "7B on 8 to 1024 A100",
    "flagperf": "Llama on 8 to 64 A100, A800, H100, H800",
    "bigscience": "BLOOM on 8 to 384 A100",
    "nemo": "GPT and Llama in fp8 on 8 to 512 H100",
}


def scoreboard_rows() -> Iterator[list[str]]:
    """For each source of measured runs the errors of predictions, and those of runs left out."""
    record = results("scoreboard")
    for name, label in _SOURCES.items():
        for part, title in (("looked", f"{name}: {label}"), ("held", "left out")):
            source = record[part]["sources"].get(name)
            if source is None:
                continue
            cells = [title, str(source["runs"])]
            cells += [f"{source[key]:.1%}" for key in ("error", "scaled_error")]
            if source["groups"]:
                cells += [f"{source['spearman']:.2f} ({source['groups']})"]
                cells += [f"{source['regret']:.2f}, {source['worst_regret']:.2f}"]
                cells += [f"{source['worst_regret_of_3']:.2f}"]
            else:
                cells += ["", "", ""]
            memory = source["memory_error"]
            yield [*cells, "" if memory is None else f"{memory:.0%}"]


def scoreboard() -> list[str]:
    record = results("scoreboard")
    sources = [each for part in ("looked", "held") for each in record[part]["sources"].values()]
    known, out, said = (
        sum(each[key] for each in sources) for key in ("known", "ran_out", "said_out")
    )
    both = sum(round((each["recall"] or 0) * each["ran_out"]) for each in sources)
    return section(
        "Steps that others measured",
        "scoreboard.py",
        "scoreboard.json",
        "Steps predicted from data sheets and profiles of single ops and messages, beside "
        "published runs; rows left out were set aside while the model was made. Of all "
        f"{known} runs {out} ran out of memory, {said} are predicted to, {both} are both.",
        table(
            "source | runs | mean error of the step | after one free factor | median Spearman "
            "(groups) | regret, mean and worst | worst of the best three | memory error",
            scoreboard_rows(),
        ),
    )


SECTIONS: tuple[Callable[[], list[str]], ...] = (
    training, small_steps, zero, pipelines, mixed_speeds, overlap, loss_chunks, precision, losses,
    compile_time, explore_page, planning, planning_speed, measured_choice, models, on_a_gpu,
    proofs, kernels, scoreboard,
)  # fmt: skip


def figures() -> str:
    """The page of all measured figures but those beside papers."""
    lines = [
        "# Figures",
        "",
        "For those who want every number: tables that the build of this site makes from the "
        "results in the repository. [What is measured](measured.md) says how to read them; "
        "[Papers](papers.md) has the figures of papers beside ours.",
        "",
    ]
    for write in SECTIONS:
        lines += write()
    return "\n".join(lines)
