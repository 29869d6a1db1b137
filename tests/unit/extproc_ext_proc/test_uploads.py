"""Who gives way when the bodies that have not ended hold too much."""

from dataclasses import dataclass, field

from extproc.ext_proc.exchange import Uploads

KIB = 1 << 10


@dataclass(eq=False)
class Body:
    uploads: Uploads
    gone: list["Body"] = field(default_factory=list)

    def give_way(self) -> None:
        self.uploads.release(self)
        self.gone.append(self)


def bodies(count: int, *, most: int) -> tuple[Uploads, list[Body], list[Body]]:
    uploads, gone = Uploads(most_bytes=most), list[Body]()
    return uploads, [Body(uploads, gone) for _ in range(count)], gone


def test_what_is_released_is_no_longer_held() -> None:
    uploads, (one, other), gone = bodies(2, most=10 * KIB)
    uploads.hold(one, 4 * KIB)
    uploads.hold(one, 6 * KIB)
    uploads.hold(other, 3 * KIB)
    assert uploads.held_bytes == 9 * KIB
    uploads.release(one)
    uploads.release(one)
    assert (uploads.held_bytes, gone, uploads.gave_way) == (3 * KIB, [], 0)


def test_the_largest_gives_way_and_not_the_newest() -> None:
    uploads, (large, larger, small), gone = bodies(3, most=10 * KIB)
    uploads.hold(large, 3 * KIB)
    uploads.hold(larger, 7 * KIB)
    uploads.hold(small, 1)
    assert (gone, uploads.held_bytes, uploads.gave_way) == ([larger], 3 * KIB + 1, 1)


def test_of_those_alike_the_one_that_was_so_large_first_gives_way() -> None:
    uploads, (first, second, third), gone = bodies(3, most=10 * KIB)
    uploads.hold(first, 4 * KIB)
    uploads.hold(second, 4 * KIB + 1)
    uploads.hold(third, 4 * KIB)
    assert gone == [first]


def test_a_body_that_is_too_large_alone_gives_way_itself() -> None:
    uploads, (one, other), gone = bodies(2, most=10 * KIB)
    uploads.hold(other, 1)
    uploads.hold(one, 11 * KIB)
    assert (gone, uploads.held_bytes) == ([one], 1)


def test_many_small_bodies_give_way_too_one_for_one() -> None:
    uploads, many, gone = bodies(1000, most=100 * KIB)
    for body in many:
        uploads.hold(body, KIB)
    assert (len(gone), uploads.held_bytes) == (900, 100 * KIB)
