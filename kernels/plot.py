"""Plots of ladders: the time of every version, and the roofline below which none can fall."""

from pathlib import Path

COLORS = {"fp32": "#4878d0", "tf32": "#ee854a", "3xtf32": "#6acc64"}  # by precision; a library's version is grey


def plot_ladder(rows: list, file: str | Path, title: str = "") -> None:
    """One panel an op: microseconds a version on a logarithmic scale; the dashed line is what bytes and FLOPs allow."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("error: plots need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch
    from matplotlib.ticker import LogLocator, NullFormatter

    from kernels.op import PRECISION_NAMES

    timed = [row for row in rows if row.us]
    if not timed:
        raise SystemExit("error: nothing was timed, so there is nothing to plot: that takes a GPU")
    ops = list(dict.fromkeys(row.op for row in timed))
    plt.rcParams.update({"font.family": "sans-serif", "font.size": 10, "svg.hashsalt": "llm.numba"})
    width = max(7, 0.65 * max(len([row for row in timed if row.op == op]) for op in ops))  # inches: room for a bar's label
    figure, axes = plt.subplots(len(ops), 1, figsize=(width, 2.9 * len(ops)), squeeze=False, constrained_layout=True)
    for axis, op in zip(axes[:, 0], ops, strict=True):
        ladder = [row for row in timed if row.op == op]
        names = [str(row.version) for row in ladder]
        colors = ["#b0b7c3" if row.version == 0 else COLORS[row.precision] for row in ladder]
        bars = axis.bar(names, [row.us for row in ladder], color=colors)
        precisions = [precision for precision in COLORS if any(row.precision == precision and row.version for row in ladder)]
        if len(precisions) > 1:
            keys = [Patch(color=COLORS[precision], label=PRECISION_NAMES[precision] or "fp32") for precision in precisions]
            axis.legend(handles=keys, fontsize=8, frameon=False, loc="upper right", bbox_to_anchor=(1, 0.93))
        labels = [f"{row.us:.3g}" if row.us < 1000 else f"{row.us / 1000:.3g} ms" for row in ladder]
        axis.bar_label(bars, labels, fontsize=8 if len(ladder) < 10 else 7, padding=1)
        floor = min(row.us * row.of_roofline for row in ladder)
        axis.axhline(floor, color="#d65f5f", linestyle="--", linewidth=1)
        label = f"dashed: the roofline, {floor:.3g} us"
        axis.annotate(label, (1, 0.98), xycoords="axes fraction", ha="right", va="top", fontsize=8, color="#d65f5f")
        slowest = max(row.us for row in ladder)
        axis.set_yscale("log")
        axis.set_ylim(floor / 2, 3 * slowest)
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if slowest < 50 * floor else (1,)))
        axis.yaxis.set_minor_formatter(NullFormatter())
        sizes = ", ".join(f"{name}={size}" for name, size in ladder[0].shape.items())
        axis.set(title=f"{op} ({sizes})", ylabel="us (log scale)", xlabel="version")
        axis.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title)
    figure.savefig(file, metadata={"Date": None} if str(file).endswith(".svg") else None, dpi=150)
    plt.close(figure)
