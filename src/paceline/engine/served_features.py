"""What a target engine sends of its features to drafters elsewhere: along with verdicts, and more on demand."""

from __future__ import annotations

from paceline.engine.feature_bytes import rows_per_message, to_features
from paceline.engine.kv.pool import SequenceKV
from paceline.engine.runner import ModelRunner
from paceline.errors import InvalidArgument
from paceline.messages import FeatureDtype, FeatureFormat, Features, Verify

_FULL_MESSAGES = 32
"""Of a pass that judges more sessions each one gets less along: their answers wait in one stream, which is bounded."""


class ServedFeatures:
    """The features of a runner that keeps them, for the wire.

    Args:
        runner: made with the taps that `feature_format` describes.
        feature_format: what is said of them.

    Attributes:
        format: what is said of them.
    """

    def __init__(self, runner: ModelRunner, feature_format: FeatureFormat) -> None:
        self._runner = runner
        self.format = feature_format

    @property
    def _dtype(self) -> FeatureDtype:
        return self.format.dtype

    def along(self, command: Verify, kv: SequenceKV, num_judged: int = 1) -> Features | None:
        """What goes along with a verdict: the newest rows of those that were asked for, as many as a message holds.

        Args:
            command: that asked.
            kv: rows of its session.
            num_judged: sessions that the pass has judged.
        """
        if command.features_from is None or command.features_from >= kv.num_rows:
            return None
        share = -(-num_judged // _FULL_MESSAGES)
        most = max(rows_per_message(self.format.width, self._dtype) // share, 1)
        first_row = max(command.features_from, kv.num_rows - most)
        return to_features(self._runner.features(kv).read(first_row, kv.num_rows), first_row, self._dtype)

    def read(self, kv: SequenceKV, first_row: int, num_rows: int) -> Features:
        """The first of the rows [first_row, first_row + num_rows), as many as a message holds.

        Raises:
            InvalidArgument: the session has no such rows now.
        """
        stop = first_row + num_rows
        if not 0 <= first_row < stop <= kv.num_rows:
            raise InvalidArgument(
                f"features of rows [{first_row}, {stop}) are wanted, but {kv.num_rows} rows are computed; ask again "
                "after the next verdict",
                field="first_row",
            )
        stop = min(stop, first_row + rows_per_message(self.format.width, self._dtype))
        return to_features(self._runner.features(kv).read(first_row, stop), first_row, self._dtype)
