import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.token_log import TokenLog, common_prefix_len

TOKENS = st.lists(st.integers(0, 2), max_size=12)


class TestHash:
    def test_known_answers(self) -> None:
        """Replicas of two versions must agree."""
        log = TokenLog([1, 2, 3, 49151])
        assert [log.hash_at(length) for length in range(5)] == [
            -3750763034362895579,
            -5808588769877802719,
            2503769086676945166,
            477951851170803350,
            846657166920292681,
        ]

    @given(TOKENS, TOKENS)
    def test_equal_hashes_mean_equal_tokens(self, left: list[int], right: list[int]) -> None:
        assert (TokenLog(left).hash_at(len(left)) == TokenLog(right).hash_at(len(right))) == (left == right)

    @given(TOKENS, TOKENS)
    def test_hash_of_a_prefix_does_not_depend_on_what_follows(self, head: list[int], tail: list[int]) -> None:
        log = TokenLog(head + tail)
        assert log.hash_at(len(head)) == TokenLog(head).hash_at(len(head))

    @given(st.lists(st.integers(0, 2**31 - 1), max_size=20))
    def test_fits_a_signed_64_bit_field(self, tokens: list[int]) -> None:
        assert -(2**63) <= TokenLog(tokens).hash_at(len(tokens)) < 2**63


class TestLog:
    @given(st.lists(st.one_of(TOKENS, st.integers(0, 15)), max_size=8))
    def test_behaves_like_a_list(self, steps: list[list[int] | int]) -> None:
        log, naive = TokenLog(), list[int]()
        for step in steps:
            if isinstance(step, int):
                log.crop(step)
                naive = naive[:step]
            else:
                log.extend(step)
                naive += step
            assert list(log.tokens) == naive
            assert len(log) == len(naive)
            assert [log.hash_at(n) for n in range(len(naive) + 1)] == [
                TokenLog(naive).hash_at(n) for n in range(len(naive) + 1)
            ]

    def test_slice_is_half_open(self) -> None:
        assert TokenLog([4, 5, 6, 7]).slice(1, 3) == (5, 6)


class TestReconcile:
    @given(held=TOKENS, committed=TOKENS, catch_up_len=st.integers(0, 12))
    def test_against_a_model_that_sees_all_tokens(
        self, held: list[int], committed: list[int], catch_up_len: int
    ) -> None:
        catch_up_len = min(catch_up_len, len(committed))
        start = len(committed) - catch_up_len
        if held[: len(committed)] == committed:
            expected = None  # holds them already, perhaps more
        elif start > len(held):
            expected = len(held)  # behind: says how far it is
        elif held[:start] == committed[:start]:
            expected = None  # the catch-up closes the gap or replaces what differs
        else:
            expected = 0  # contents differ

        log = TokenLog(held)
        prefix_hash = TokenLog(committed).hash_at(len(committed))
        assert log.reconcile(len(committed), prefix_hash, committed[start:]) == expected
        assert list(log.tokens) == (committed if expected is None else held)
        fresh = TokenLog(log.tokens)
        assert [log.hash_at(n) for n in range(len(log) + 1)] == [fresh.hash_at(n) for n in range(len(log) + 1)]

    @given(held=TOKENS, committed=TOKENS)
    def test_the_answer_is_what_makes_the_next_try_succeed(self, held: list[int], committed: list[int]) -> None:
        log = TokenLog(held)
        prefix_hash = TokenLog(committed).hash_at(len(committed))
        for _ in range(3):
            have_len = log.reconcile(len(committed), prefix_hash, [])
            if have_len is not None:
                have_len = log.reconcile(len(committed), prefix_hash, committed[have_len:])
            if have_len is not None:
                have_len = log.reconcile(len(committed), prefix_hash, committed[have_len:])
            assert have_len is None
        assert list(log.tokens) == committed

    def test_ahead_crops_to_the_committed_prefix(self) -> None:
        log = TokenLog([1, 2, 3, 4])
        assert log.reconcile(2, TokenLog([1, 2]).hash_at(2), []) is None
        assert list(log.tokens) == [1, 2]

    def test_wrong_catch_up_changes_nothing(self) -> None:
        log = TokenLog([1, 2, 3, 4])
        assert log.reconcile(6, TokenLog([1, 2, 3, 4, 5, 6]).hash_at(6), [5, 7]) == 0
        assert list(log.tokens) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("left", "right", "length"),
    [([], [], 0), ([1], [], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 2, 4], 2), ([5], [6], 0), ([1, 2], [1, 2], 2)],
)
def test_common_prefix_len(left: list[int], right: list[int], length: int) -> None:
    assert common_prefix_len(left, right) == common_prefix_len(right, left) == length


def test_common_prefix_len_does_not_care_what_holds_the_tokens() -> None:
    assert common_prefix_len([1, 2, 3], (1, 2, 4)) == 2
    assert common_prefix_len((1, 2), [1, 2]) == 2


@pytest.mark.parametrize("at", [0, 1, 2047, 2048, 4094, 4095])
def test_common_prefix_len_of_long_sequences(at: int) -> None:
    left, right = [7] * 4096, [7] * 4096
    right[at] = 8
    assert common_prefix_len(left, right) == at


@given(TOKENS, TOKENS, TOKENS)
def test_common_prefix_len_is_exact(head: list[int], left: list[int], right: list[int]) -> None:
    one, other = head + left, head + right
    length = common_prefix_len(one, other)
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]
