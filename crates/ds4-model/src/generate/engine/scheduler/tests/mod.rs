//! Random sequences of texts that come, end, leave and outgrow the memory: what is planned can be
//! carried out, keeps to all bounds, and lets every text get to its end.

mod host;
mod world;

use std::collections::BTreeSet;

use self::host::{RECORDING, Random};
use self::world::{CALL, CHUNK, MOST_STEPS, SIZES, World};
use super::task::chunk_end;
use super::*;

fn limits(random: &mut Random) -> Limits {
    let ways = 1 + random.below(2);
    Limits {
        lanes: 1 + random.below(12),
        ways,
        chunk: CHUNK,
        call: CALL,
        lane_rows: 1 + random.below(3),
        exact_rows: 16,
        marks: random.below(2) == 0,
        sizes: SIZES,
        step: [1, 1 + random.below(4)],
        bytes: [usize::MAX, 2 * SIZES[1], SIZES[1] + 200, 150][random.below(4)],
    }
}

/// How often something has happened: a text was added, gave way, was refused memory, went on from
/// less than was kept, and failed.
fn run(seed: u64, refusals: usize) -> [usize; 5] {
    let mut random = Random(seed);
    let mut world = World::new(seed, limits(&mut random), refusals);
    world.host.device = [usize::MAX, 3 * SIZES[1], SIZES[1] + 150][random.below(3)];
    world.ends = true;
    world.kinds = [0, 3, 12][random.below(3)];
    let mut added = 0;
    for _ in 0..40 {
        for _ in 0..random.below(4).saturating_sub(1) * random.below(6) {
            let prompt = [1 + random.below(12), 1 + random.below(200)][random.below(2)];
            let choices = [1, 1, 3][random.below(3)];
            let (more, priority) = (1 + random.below(90), random.below(2) as i64);
            // What can never fit is refused before it comes here.
            let capacity = world.scheduler.capacity_of(prompt, prompt + more);
            if capacity.saturating_add(prompt) <= world.scheduler.limits.bytes {
                for _ in 0..choices {
                    world.add(prompt, more, priority);
                }
                added += choices;
            }
        }
        let ids: Vec<RequestId> = world.texts.keys().copied().collect();
        if random.below(6) == 0 && !ids.is_empty() {
            world.remove(ids[random.below(ids.len())]);
            world.check();
        }
        world.step();
    }
    world.finish();
    world.step();
    assert!(world.groups.len() <= 2, "{:?}", world.groups);
    let failed = world.failed.len();
    [added, world.preempted, world.refused, world.resumed, failed]
}

fn runs(seeds: std::ops::Range<u64>, refusals: usize) -> [usize; 5] {
    let all = seeds.map(|seed| run(seed, refusals));
    all.fold([0; 5], |sum, own| {
        std::array::from_fn(|index| sum[index] + own[index])
    })
}

#[test]
fn whatever_comes_and_goes_all_bounds_hold_and_every_text_gets_to_its_end() {
    let [added, preempted, refused, resumed, failed] = runs(0..300, 0);
    assert!(added > 20_000, "{added} texts");
    assert!(preempted > 500, "{preempted} preempted");
    assert_eq!(refused, 0);
    assert!(resumed > 50, "{resumed} resumed");
    assert!(failed * 8 < added, "{failed} of {added} failed");
}

#[test]
fn what_a_device_refuses_is_tried_again_and_nothing_is_lost() {
    let [added, _, refused, _, failed] = runs(1000..1200, 10);
    assert!(refused > 500, "{refused} refused");
    assert!(failed * 6 < added, "{failed} of {added} failed");
}

fn plain(bytes: usize) -> Limits {
    Limits {
        lanes: 8,
        ways: 1,
        chunk: CHUNK,
        call: CALL,
        lane_rows: 1,
        exact_rows: 16,
        marks: false,
        sizes: SIZES,
        step: [1, 1],
        bytes,
    }
}

#[test]
fn short_prompts_go_through_one_call_and_those_that_are_alike_share_a_sequence() {
    let limits = Limits {
        lane_rows: 5,
        ..plain(usize::MAX)
    };
    let mut world = World::new(0, limits, 0);
    for prompt in [9, 12, 12, 7] {
        world.add(prompt, 3, 0);
    }
    let plan = world.scheduler.plan(&[], &mut world.host);
    let id = GroupId {
        capacity: 16,
        way: 0,
    };
    assert_eq!(plan.changes, [Change::Make(id, 4)]);
    let [call] = &plan.calls[..] else {
        panic!("{:?}", plan.calls);
    };
    assert_eq!(call.shape(), [3, 11]);
    let rows: Vec<_> = call
        .rows
        .iter()
        .map(|row| (row.sequence, row.end, row.enters))
        .collect();
    assert_eq!(
        rows,
        [(0, 8, true), (1, 11, true), (1, 11, true), (2, 6, true)]
    );
    assert_eq!(world.scheduler.decoded(), [id]);
}

#[test]
fn the_youngest_text_gives_way_and_those_of_a_higher_priority_last() {
    // Two texts in small lanes and one in a large one: more than there is.
    let mut world = World::new(0, plain(64 + 2 * 16 + 15), 0);
    let old = world.add(10, 30, 0);
    let young = world.add(9, 30, 0);
    let first = world.add(8, 30, 1);
    let mut order = Vec::new();
    for _ in 0..MOST_STEPS {
        let before = world.preempted;
        let placed: Vec<RequestId> = [old, young, first]
            .into_iter()
            .filter(|id| world.texts.get(id).is_some_and(|text| text.lane.is_some()))
            .collect();
        world.step();
        if world.preempted > before {
            let is_gone =
                |id: &RequestId| world.texts.get(id).is_some_and(|text| text.lane.is_none());
            order.extend(placed.into_iter().filter(is_gone));
        }
        if world.texts.is_empty() {
            break;
        }
    }
    assert!(world.texts.is_empty() && world.failed.is_empty());
    assert_eq!(order.first(), Some(&young), "{order:?}");
    assert!(!order.contains(&first), "{order:?}");
}

#[test]
fn a_text_that_does_not_fit_by_itself_fails_and_the_others_go_on() {
    // Its larger lane does not fit, or not beside the one that it has.
    for bytes in [60, 70, 79] {
        let mut world = World::new(0, plain(bytes), 0);
        let grows = world.add(10, 40, 0);
        let stays = world.add(5, 11, 0);
        world.finish();
        assert_eq!(world.failed, BTreeSet::from([grows]), "{bytes} bytes");
        assert!(world.preempted == 0 && !world.failed.contains(&stays));
    }
}

#[test]
fn a_text_that_would_not_fit_again_does_not_give_way() {
    // A lane of 64 and one of 16 fit, but no prompt of 50 beside a lane of 64.
    let mut world = World::new(0, plain(64 + 2 * 16), 0);
    let large = world.add(20, 43, 0);
    let [first, second] = [10, 11].map(|prompt| world.add(prompt, 30, 1));
    world.finish();
    assert!(world.failed.is_empty(), "{:?}", world.failed);
    assert!(world.preempted > 0, "{large} {first} {second}");
}

#[test]
fn choices_that_share_a_sequence_keep_a_call_to_what_has_the_same_bits() {
    let limits = Limits {
        lane_rows: 3,
        step: [1, 5],
        ..plain(usize::MAX)
    };
    let mut world = World::new(0, limits, 0);
    // It leaves a small lane, whose steps are exact; those of eight larger ones are not.
    world.add(5, 2, 0);
    world.finish();
    for (prompt, more) in [(13, 20), (14, 20), (14, 20), (14, 20), (14, 20), (14, 1)] {
        world.add(prompt, more, 0);
    }
    world.host.give_back();
    // The world checks each call.
    world.finish();
    assert!(world.failed.is_empty());
}

#[test]
fn a_refusal_fails_nobody_but_the_text_that_asked_and_not_before_it_was_alone() {
    // A device that says yes, and refuses the large lane whenever it is asked for one.
    let mut world = World::new(0, plain(usize::MAX), 0);
    world.refused_size = Some(64);
    let small = world.add(6, 4, 0);
    let large = world.add(40, 4, 0);
    let after = world.add(7, 4, 0);
    world.finish();
    assert_eq!(world.failed, BTreeSet::from([large]));
    assert!(![small, after].iter().any(|id| world.failed.contains(id)));
    assert!(world.refused > 0 && world.preempted == 0);
}

#[test]
fn prompts_in_progress_stay_when_another_text_is_refused() {
    let mut world = World::new(0, plain(usize::MAX), 0);
    world.refused_size = Some(64);
    let long = world.add(200, 4, 0);
    world.step();
    assert_eq!(world.scheduler.tasks[0].processed, CHUNK);
    let refused = world.add(40, 4, 1);
    world.step();
    assert!(world.refused > 0 && world.scheduler.place(refused).is_none());
    let processed = |world: &World| world.scheduler.tasks[1].processed;
    assert!(world.scheduler.place(long).is_some());
    assert_eq!(processed(&world), CHUNK);
    world.step();
    assert_eq!(processed(&world), 2 * CHUNK);
}

#[test]
fn idle_recordings_make_way_before_a_text_waits_and_those_that_are_replayed_stay() {
    let id = GroupId {
        capacity: 16,
        way: 0,
    };
    let mut world = World::new(0, plain(usize::MAX), 0);
    let first = world.add(5, 12, 0);
    world.step();
    world.host.recorded.insert(id, vec![1, 2, 0]);
    // With one recording there is place for two lanes and a prompt, with three there is none.
    world.host.device = 3 * 16 + 2 * RECORDING;
    let second = world.add(6, 8, 0);
    world.step();
    assert_eq!(world.host.recorded[&id], [0], "what is replayed stays");
    assert!(world.scheduler.place(second).is_none());
    world.step();
    assert!(world.scheduler.place(second).is_some());
    assert!(world.scheduler.place(first).is_some() && world.preempted == 0);
    // For want of other bytes, none goes.
    let mut world = World::new(0, plain(2 * 16), 0);
    world.add(5, 12, 0);
    world.step();
    world.host.recorded.insert(id, vec![1, 2, 0]);
    world.add(6, 8, 0);
    world.step();
    assert_eq!(world.host.recorded[&id], [1, 2, 0]);
    world.finish();
    assert!(world.failed.is_empty());
}

#[test]
fn idle_recordings_stay_where_a_text_waits_for_more_than_they_leave() {
    let id = GroupId {
        capacity: 16,
        way: 0,
    };
    // A lane, two recordings of which one is idle, and then two lanes and a prompt beside them.
    let enough = 16 + RECORDING + 2 * 16 + 6;
    for (device, is_refused, left) in [
        (enough, false, 1),
        (enough - 1, false, 2),
        (enough - 1, true, 1),
    ] {
        let mut world = World::new(0, plain(usize::MAX), 0);
        let first = world.add(5, 8, 0);
        world.step();
        world.host.recorded.insert(id, vec![1, 0]);
        world.host.device = device;
        let second = world.add(6, 8, 0);
        let index = world.scheduler.index(second).expect("it was added");
        world.scheduler.tasks[index].is_refused = is_refused;
        world.step();
        let what = format!("{device} bytes, refused: {is_refused}");
        assert_eq!(world.host.recorded[&id].len(), left, "{what}");
        assert!(world.scheduler.place(second).is_none(), "{what}");
        assert!(world.scheduler.place(first).is_some(), "{what}");
        world.finish();
        assert!(world.failed.is_empty(), "{what}");
    }
}

#[test]
fn unused_lanes_go_where_no_text_that_wants_them_may_begin() {
    let large = GroupId {
        capacity: 64,
        way: 0,
    };
    // Two texts that begin first leave none of two lanes, and one of three.
    for lanes in [2, 3] {
        let limits = Limits {
            lanes,
            ..plain(usize::MAX)
        };
        let mut world = World::new(0, limits, 0);
        let leaves = world.add(40, 15, 1);
        world.step();
        assert_eq!(world.groups[&large], [Some(leaves)]);
        world.remove(leaves);
        world.add(3, 12, 1);
        world.add(4, 11, 1);
        let waits = world.add(40, 15, 0);
        // There is no place for its prompt.
        world.host.device = 64 + 2 * 16 + 6;
        world.step();
        assert!(world.scheduler.place(waits).is_none());
        assert_eq!(
            world.groups.contains_key(&large),
            lanes == 3,
            "{lanes} lanes"
        );
        world.host.device = usize::MAX;
        world.finish();
        assert!(world.failed.is_empty());
    }
}

#[test]
fn recordings_make_way_before_a_text_gives_way_or_fails() {
    let small = GroupId {
        capacity: 16,
        way: 0,
    };
    // Two texts, of which the first outgrows its lane, and three recordings of their steps.
    let start = |device| {
        let mut world = World::new(0, plain(usize::MAX), 0);
        let ids = [(14, 30), (3, 10)].map(|(prompt, more)| world.add(prompt, more, 0));
        world.step();
        world.host.recorded.insert(small, vec![1, 2, 0]);
        world.host.device = device;
        world.finish();
        (world, ids)
    };
    let (world, _) = start(2 * 16 + 64 + RECORDING);
    assert!(world.preempted == 0 && world.failed.is_empty());
    // Where that is not enough, the younger one gives way.
    let (world, _) = start(2 * 16 + 64 - 1);
    assert!(world.preempted > 0 && world.failed.is_empty());
    // One that comes to idle lanes begins, too.
    let mut world = World::new(0, plain(usize::MAX), 0);
    world.add(3, 4, 0);
    world.finish();
    world.host.recorded.insert(small, vec![1, 2]);
    world.host.device = 64 + 40;
    world.add(40, 5, 0);
    world.finish();
    assert!(world.failed.is_empty());
}

#[test]
fn a_lane_that_was_given_way_is_taken_as_it_is() {
    let large = GroupId {
        capacity: 64,
        way: 0,
    };
    let mut world = World::new(0, plain(64 + 2 * 16 + 15), 0);
    let old = world.add(12, 30, 0);
    world.step();
    let young = world.add(12, 30, 0);
    while world.preempted == 0 {
        world.step();
    }
    let place = |id| world.scheduler.place(id).map(|own| own.group);
    assert_eq!((place(old), place(young)), (Some(large), None));
    // The same where the younger one has the large lane.
    let mut world = World::new(0, plain(64 + 2 * 16 + 15), 0);
    let old = world.add(8, 40, 0);
    world.step();
    let young = world.add(14, 30, 0);
    while world.preempted == 0 {
        world.step();
    }
    assert_eq!(world.groups[&large], [None], "it is kept for the other");
    assert!(world.scheduler.place(young).is_none());
    world.step();
    assert_eq!(world.groups[&large], [Some(old)]);
    world.finish();
    assert!(world.failed.is_empty());
}

#[test]
fn what_a_text_had_generated_returns_in_whole_chunks_where_its_steps_are_not_exact() {
    for (lane_rows, calls) in [(1, 2), (20, 1)] {
        let limits = Limits {
            lane_rows,
            ..plain(usize::MAX)
        };
        let mut world = World::new(0, limits, 0);
        let id = world.add(10, 120, 0);
        world.step();
        let index = world.scheduler.index(id).expect("it was added");
        let task = &mut world.scheduler.tasks[index];
        (task.tokens, task.processed, task.is_decoded) = (60, 20, false);
        let mut ends = Vec::new();
        while ends.last() != Some(&59) {
            let (end, _) = world.scheduler.chunk(index);
            ends.push(end);
            world.scheduler.tasks[index].processed = end;
        }
        assert_eq!(ends.len() > calls, lane_rows == 1, "{ends:?}");
        assert!(lane_rows > 1 || ends == [36, 52, 59], "{ends:?}");
    }
}

#[test]
fn only_prompts_of_more_than_an_eighth_of_a_chunk_end_at_a_mark() {
    for (last, expected) in [(11, (11, false)), (256, (256, false)), (300, (296, true))] {
        assert_eq!(chunk_end([0, last], 2048, true), expected);
        assert_eq!(chunk_end([0, last], 2048, false), (last, false));
    }
    assert_eq!(chunk_end([0, 5000], 2048, true), (512, true));
    assert_eq!(chunk_end([2048, 5000], 2048, true), (4096, true));
}
