"""What a person reads after training: the result of one run, and comparisons of several."""

from collections.abc import Sequence
from pathlib import Path

from lockstep.files import atomic_write, shortest_path, write_json
from lockstep.report.comparison import Comparison, compare, find_runs
from lockstep.report.tables import markdown, print_comparison, print_result

__all__ = ["Comparison", "compare", "find_runs", "print_result", "write_comparison"]


def write_comparison(paths: Sequence[Path], folder: Path) -> list[Comparison]:
    """Compare the runs at or below `paths`, and write comparison.md, comparison.json and figures into `folder`.

    Return the comparisons; none if fewer than two runs are finished.
    """
    runs, left_out = find_runs(paths)
    for path, reason in left_out.items():
        print(f"left out of the comparison, {reason}: {shortest_path(path)}")
    if len(runs) < 2:
        return []
    from lockstep.report import figures  # imports matplotlib, which a command that only trains should not wait for

    comparisons = compare(runs)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = figures.draw(comparisons, folder)
    figures.show_in_tensorboard(drawn, folder / "comparison")
    with atomic_write(folder / "comparison.md") as file:
        file.write(markdown(comparisons, left_out, drawn).encode())
    write_json(folder / "comparison.json", [comparison.content() for comparison in comparisons])
    print_comparison(comparisons, folder)
    return comparisons
