# Two hundred kills at random moments of a ledger's life, in either store.

from tests.promotion.ledger.test_processes import nothing_is_lost_or_doubled, processes

KILLS = 200


def test_what_was_acknowledged_survives_two_hundred_kills(where, swift_path):
    acknowledged = processes("killed", where, swift_path, KILLS, 21)

    nothing_is_lost_or_doubled(acknowledged, where, swift_path)
    assert len(acknowledged) > KILLS


def test_what_was_acknowledged_survives_two_hundred_lost_connections(cluster, swift_path):
    where = cluster.place()

    acknowledged = processes("terminated", where, swift_path, KILLS, 22)

    nothing_is_lost_or_doubled(acknowledged, where, swift_path)
    assert len(acknowledged) > KILLS
