"""Where the target's features of one session are: at its drafter, here on their way to it, or only at the verifier.

Pure. With L committed tokens there are features of rows [0, L - 1):

    rows [0, have_len)     at the drafter, as far as is known
    rows of `pending`      here; they came with verdicts and go with the next draft
    rows between           only at the verifier: fetched in bulk, beside the streams, while decoding goes on plainly

A fetch brings the rows of `pending` too. No more of those are kept than a message holds, and rounds go on: the oldest
would be gone when the fetch has ended, and be fetched in turn, for as long as the generation lasts.
"""

from __future__ import annotations

from paceline.messages import MAX_FEATURE_BYTES, FeatureFormat, Features

_MAX_FAILED_FETCHES = 2
"""After so many the drafter is left without what it lacks."""
_MAX_LOSSES = 3
"""A drafter that has lost its rows more often has no room for them: they are not brought over and over again."""


class FeatureBook:
    """The features of one session.

    Args:
        fetches: whether what the drafter lacks is fetched; else it is left without.

    Attributes:
        have_len: the drafter has rows [0, have_len), as far as is known; with a gap where it was told to start short.
        fetching: rows that are being fetched; None while none are.
    """

    def __init__(self, fetches: bool = True) -> None:
        self._fetches = fetches
        self._format: FeatureFormat | None = None
        self._pending: Features | None = None
        self._num_failed = 0
        self._num_losses = 0
        self.have_len = 0
        self.fetching: range | None = None

    def attached(self, wanted: FeatureFormat | None) -> None:
        """A drafter was found, which has none; it builds on such ones, or on none."""
        self._format = wanted
        self._num_failed = 0
        self._num_losses = 0
        self.have_len = 0
        self.fetching = None

    def verifier_moved(self, same_features: bool = True) -> None:
        """Another verifier has the session: nothing more comes of what was asked of the old one.

        Args:
            same_features: it serves those that the old one did, so that rows of both belong together.
        """
        if not same_features:
            self._pending = None
        self.fetching = None
        self._num_failed = 0

    @property
    def only_last(self) -> bool:
        """Whether the drafter reads the newest row alone."""
        return self._format is not None and self._format.only_last

    def wanted_from(self, base_len: int) -> int:
        """The first row to come with a verdict on what follows so many tokens.

        It is neither at the drafter nor here, nor on its way. To one that needs the newest alone no older row is sent.
        """
        if self.only_last:
            return base_len - 1
        if self._pending is not None:
            return self._pending.end
        return max(self.have_len, self.fetching.stop if self.fetching is not None else 0)

    def verified(self, features: Features | None, num_rows: int) -> None:
        """Takes in what came with a verdict, after which the session has so many rows; whatever ends elsewhere is void.

        Without it the rows that are here are of no use any more: those that follow them are missing.
        """
        if features is not None and features.end != num_rows:
            features = None
        pending = None if self.only_last else self._pending
        if features is None or pending is None or not pending.first_row <= features.first_row <= pending.end:
            self._pending = features
        elif (pending.width, pending.dtype) == (features.width, features.dtype):
            kept = (features.first_row - pending.first_row) * pending.row_bytes
            data = pending.data[:kept] + features.data
            self._pending = _rows(features, pending.first_row, data)
        else:
            self._pending = features
        if self._pending is not None and len(self._pending.data) > MAX_FEATURE_BYTES:
            # No more goes with a draft, which shares its stream with others; the rest is fetched when it is needed.
            self._pending = _from_row(self._pending, self._pending.end - MAX_FEATURE_BYTES // self._pending.row_bytes)

    def lacking(self, base_len: int) -> range | None:
        """Rows to fetch before a draft after so many tokens, those that are here included; None if it can be asked for.

        A drafter that needs the last token's only is never made to wait.
        """
        end = base_len - 1
        first_here = end if self._pending is None else self._pending.first_row
        if self.only_last:
            return None if first_here < end or self.have_len >= end else range(end - 1, end)
        return range(self.have_len, end) if self.have_len < first_here else None

    @property
    def hopeless(self) -> bool:
        """Whether the drafter does not get what it lacks: nobody fetches it, or that has been of no use too often."""
        return not self._fetches or self._num_failed >= _MAX_FAILED_FETCHES or self._num_losses > _MAX_LOSSES

    def fetched(self, succeeded: bool) -> None:
        """A fetch has ended."""
        rows, self.fetching = self.fetching, None
        if rows is None:
            return
        if not succeeded:
            self._num_failed += 1
        elif self.have_len >= rows.start:
            self._num_failed = 0
            self.have_len = max(self.have_len, rows.stop)

    def take(self, base_len: int) -> Features | None:
        """What goes with a draft after so many tokens: rows that the drafter may lack."""
        pending, self._pending = self._pending, None
        first_row = base_len - 2 if self.only_last else self.have_len
        self.have_len = base_len - 1
        if pending is None or pending.end <= first_row:
            return None
        return _from_row(pending, max(first_row, pending.first_row))

    def drafter_says(self, features_len: int, base_len: int) -> None:
        """The drafter has answered a draft after `base_len` tokens, and says how far its rows go."""
        if features_len < base_len - 1:
            self._num_losses += 1
            self.have_len = min(self.have_len, features_len)


def _rows(like: Features, first_row: int, data: bytes) -> Features:
    return Features(first_row, len(data) // like.row_bytes, like.width, like.dtype, data)


def _from_row(features: Features, first_row: int) -> Features:
    """The rows from there on."""
    skipped = first_row - features.first_row
    return features if not skipped else _rows(features, first_row, features.data[skipped * features.row_bytes :])
