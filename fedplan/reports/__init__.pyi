# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnusedImport=false
from .client_data import data_distribution
from .explanation import explain_plan, parts_table, sort_params
from .figures.charts import Bar, Series, bar_chart, interval_chart, line_chart, mean_series
from .figures.drawing import HUES, Drawing, spreadsheet_safe
from .figures.grids import GridCell, GridRow, cell_grid, round_spans
from .forecasts import Forecast, StageForecast, forecast
from .formats import (
    TRAFFIC_LABELS,
    byte_unit,
    duration,
    format_log_entry,
    megabytes,
    millions,
    parse_since,
)
from .memory import TrainingStep
from .pages.facts import differing_fields, group_by_seed, read_run_facts, study_fields
from .pages.page import WIDTHS, Page, PageBlock, PageFigure, PageSection, block
from .pages.round_grids import roles_section
from .pages.run_report import report, watch_report
from .pages.scores import drift_section
from .pages.test_scores import evaluation_lines
from .plan_warnings import RunWarning, study_exposure, warnings_text
from .progress import run_flower_with_progress, run_with_progress
from .role_figure import RoleFigure, draw_roles
from .run_warnings import read_run_warnings
from .status import (
    follow_run,
    make_console,
    run_snapshot,
    snapshot_warnings,
    stop_run,
    watch,
    write_summary,
)
from .study_explanation import explain_study, read_privacy_statement, write_privacy_statement
from .study_warnings import NOTHING_RUN, refuse_warnings, study_warnings

__all__ = ["data_distribution", "draw_roles", "run_snapshot", "stop_run"]
