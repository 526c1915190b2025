"""Once on a machine: which native kernels lose to torch here. With a bar, and a line on how to skip it."""

from __future__ import annotations

from hasten.base.errors import InputError
from hasten.base.screen import Screen
from hasten.ops import choices, native, tune


def tune_once(screen: Screen) -> None:
    """Measures the table of `hasten.ops.choices` unless this machine has one, or nothing to choose."""
    if native.state().level is None or choices.off() or choices.path().exists():
        return
    screen.note(
        f"first use on this machine: measuring for {tune.BUDGET_S:.0f} s where torch is faster than a native "
        "kernel (--no-tune skips it)"
    )
    tune_now(screen)


def tune_now(screen: Screen) -> choices.Table:
    """Measures the table anew. A cache folder that cannot be written is a warning: then the kernels run."""
    with screen.bar("kernels or torch", tune.BUDGET_S) as bar:
        try:
            table = tune.tune(progress=lambda spent_s, case: bar.update(spent_s, case))
        except InputError as error:
            screen.warn(f"the measured choices are not kept: {error}")
            return choices.in_force()
    screen.note(summary(table))
    return table


def summary(table: choices.Table) -> str:
    """One line: how many comparisons, which of them torch wins, and where they are kept."""
    if not table.rows:
        return table.source
    lost = [f"{row.op} {row.dtype} ({row.case})" for row in table.rows if row.torch_wins]
    return f"{len(table.rows)} comparisons, torch is faster in {', '.join(lost) or 'none'}: {table.source}"
