"""The reference of every setting, as Markdown."""

from __future__ import annotations

from itertools import groupby

from picker.settings.sources import all_settings


def settings_reference() -> str:
    """One table a group: key, value, default, meaning."""
    lines = []
    for group, settings in groupby(all_settings(), key=lambda setting: ".".join(setting.path[:-1])):
        lines += [f"### {group}", "", "| key | value | default | meaning |", "| --- | --- | --- | --- |"]
        for setting in settings:
            kind = setting.kind.replace("|", "\\|")
            default = f"`{setting.default}`" if setting.default else ""
            lines.append(f"| `{setting.path[-1]}` | {kind} | {default} | {setting.description} |")
        lines.append("")
    return "\n".join(lines)
