"""Every setting of `picker serve`: one YAML file, each key also an environment variable and a flag.

`extproc.max_streams` in the file is `PICKER_EXTPROC__MAX_STREAMS` in the environment and `--extproc-max-streams`
on the command line; the flag wins over the environment, which wins over the file. The double underscore is on
purpose: for a Service called `picker-extproc` Kubernetes sets PICKER_EXTPROC_PORT=tcp://... in every pod.
"""

from picker.settings.model import Settings
from picker.settings.sources import Setting, SettingsError, all_settings, load_settings

__all__ = ["Setting", "Settings", "SettingsError", "all_settings", "load_settings"]
