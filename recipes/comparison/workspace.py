"""The W&B workspace of a comparison: panels, filter and grouping, made in code."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_gqsgd.errors import first_line
from pictures.style import COLOURS
from recipes.errors import RecipeError
from recipes.files import read_json
from recipes.launch.processes import script
from recipes.loggers.wandb_client import wandb_mode
from recipes.measuring import names
from recipes.measuring.metrics import METRICS, Metric

#: Names in the comparison's own run: of its table, and of the folder of its plots.
TABLE = "comparison"
PLOTS = "plots"

AXES = {
    names.TRAIN_TIME: "training seconds",
    names.GLOBAL_STEP: "steps",
    names.SAMPLES: "samples",
    names.EPOCH: "epochs",
    names.MB_SENT: "MB sent by process 0",
}
STEP_TIMES = {
    names.STEP_S: "step (s)",
    names.EXPOSED_S: "exposed communication (s)",
    names.ENCODE_S: "encode (s)",
    names.DECODE_S: "decode (s)",
}
CODEC = {
    names.MESSAGE_BITS: "bits per coordinate",
    names.REL_L2: "relative L2 error",
    names.NONFINITE_BLOCKS: "non-finite blocks",
}


@dataclass(frozen=True)
class Definition:
    """What a workspace shows.

    Attributes:
        group: W&B group of the runs.
        metric: key of the task's metric.
        project: W&B project of the runs.
        entity: W&B user or team; None: the default of the key.
        by: keys of the configuration; runs with equal values share a line.
        plots: names of the pictures that the comparison's run has logged.
        tables: names of the tables that the comparison's run has logged.
        more_groups: further W&B groups of the runs.
    """

    group: str
    metric: str
    project: str
    entity: str | None = None
    by: tuple[str, ...] = ("strategy.name",)
    plots: tuple[str, ...] = ()
    tables: tuple[str, ...] = (TABLE,)
    more_groups: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command line that makes this workspace."""
        words = ["python", script("workspace.py"), "--group", self.group, "--metric", self.metric]
        words += ["--project", self.project, *(["--entity", self.entity] if self.entity else [])]
        for flag, values in (
            ("--by", self.by),
            ("--plot", self.plots),
            ("--table", self.tables),
            ("--also", self.more_groups),
        ):
            words += [word for value in values for word in (flag, value)]
        return shlex.join(words)


def save_workspace(definition: Definition, file: Path) -> str | None:
    """Write a workspace to ``file``, and create it in W&B if a key is configured; returns its URL, None without a key.

    A file that has the URL of the same definition stays as it is, and nothing is created a second time.

    Raises:
        RecipeError: the filter cannot express the group; W&B refuses, or cannot be reached.
            The file has been written then, unless the filter cannot express the group.
    """
    known_url = _known_url(definition, file)
    if known_url:
        return known_url
    workspace = _workspace(definition, definition.entity or "")
    _write(definition, workspace, file, url=None)
    if wandb_mode() != "online":
        return None
    import wandb

    try:
        # The key is checked here because this call has a time limit, and saving has none.
        entity = definition.entity or wandb.Api(timeout=10).default_entity
        if entity is None:
            raise RecipeError("the key has no default entity, name one with --entity")
        workspace = _workspace(definition, entity)
        workspace.save()
        url = str(workspace.url)
    except Exception as error:  # W&B, its transports and its models raise several families of errors
        raise RecipeError(
            f"W&B has not taken the workspace: {first_line(error).rstrip('.')}; it is in {file}"
        ) from error
    _write(definition, workspace, file, url)
    return url


def _workspace(definition: Definition, entity: str) -> Any:
    """The definition as an object of wandb-workspaces."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    metric = METRICS.get(definition.metric, Metric(definition.metric, definition.metric))

    def lines(x: str, plotted: dict[str, str]) -> list[Any]:
        return [wr.LinePlot(title=title, x=x, y=[y], title_x=AXES[x], title_y=title) for y, title in plotted.items()]

    against: list[Any] = [
        wr.LinePlot(title=f"{metric.label} against {label}", x=x, y=[metric.val], title_x=label, title_y=metric.label)
        for x, label in AXES.items()
    ]
    sections = [
        ws.Section(name=f"{metric.label} against time, steps, samples, epochs, MB", panels=against, is_open=True),
        ws.Section(
            name="step time: step, exposed, encode, decode", panels=lines(names.GLOBAL_STEP, STEP_TIMES), is_open=True
        ),
        ws.Section(
            name="gqsgd: bits, relative L2 error, non-finite blocks",
            panels=lines(names.GLOBAL_STEP, CODEC),
            is_open=True,
        ),
        ws.Section(
            name="table and plots",
            panels=[
                *(wr.WeavePanelSummaryTable(table_name=table) for table in definition.tables),
                *(wr.MediaBrowser(title=plot, media_keys=[f"{PLOTS}/{plot}"]) for plot in definition.plots),
            ],
        ),
    ]
    runs = ws.RunsetSettings(
        filters=ws.And(_of_groups([definition.group, *definition.more_groups])),
        groupby=[ws.Config(key) for key in definition.by],
        group_colors=dict[Any, Any](COLOURS) if definition.by[:1] == ("strategy.name",) else {},
    )
    return ws.Workspace(
        entity=entity,
        project=definition.project,
        name=definition.group,
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis=names.TRAIN_TIME, max_runs=100),
        runset_settings=runs,
    )


def _of_groups(groups: Sequence[str]) -> Any:
    """The filter that lets the runs of these groups through."""
    import wandb_workspaces.workspaces as ws

    known = [_expressible(group) for group in groups]
    return ws.Metric("Group") == known[0] if len(known) == 1 else ws.Metric("Group").isin(known)


def _expressible(group: str) -> str:
    """The group, if a filter compares with this text: wandb-workspaces rewrites operators inside strings, too."""
    wrong = sorted(set("=<>'\"\\") & set(group))
    if wrong:
        raise RecipeError(f"group {group!r} holds {' '.join(wrong)}, which filters of a workspace cannot express")
    return group


def _write(definition: Definition, workspace: Any, file: Path, url: str | None) -> None:
    spec = json.loads(workspace._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))
    file.parent.mkdir(parents=True, exist_ok=True)
    contents = {"definition": asdict(definition), "url": url, "spec": spec}
    file.write_text(json.dumps(contents, indent=2) + "\n")


def _known_url(definition: Definition, file: Path) -> str | None:
    """URL of the workspace that ``file`` says was made from the same definition; None if there is none."""
    written = read_json(file)
    if written is None:
        return None
    known = {"more_groups": [], **(written.get("definition") or {})}  # files of earlier versions know one group
    same = known == json.loads(json.dumps(asdict(definition)))
    return written.get("url") if same else None
