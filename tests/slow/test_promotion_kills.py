# Two hundred kills at random moments of promotions, in either store.

from tests.promotion.run.test_kills import nothing_is_lost_or_doubled, promotions

KILLS = 200


def test_a_promotion_survives_two_hundred_kills(where, swift_path):
    said, kills = promotions(where, swift_path, KILLS, 41)

    nothing_is_lost_or_doubled(said, where, swift_path)
    assert kills >= KILLS
    print(f"{kills} kills in {len(said)} promotions")
