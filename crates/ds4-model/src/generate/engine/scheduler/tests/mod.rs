//! Random sequences of texts that come, end, leave and lack pages: what is planned can be
//! carried out, keeps to all bounds, and lets every text get to its end.

mod host;
mod world;

use std::collections::BTreeSet;

use self::host::{PAGE, RECORDING, RING, Random};
use self::world::{CALL, CHUNK, MANY, MOST_STEPS, REACH, World};
use super::task::chunk_end;
use super::*;

fn limits(random: &mut Random) -> Limits {
    let ways = 1 + random.below(2);
    let lane_rows = 1 + random.below(3);
    Limits {
        lanes: 1 + random.below(12),
        ways,
        chunk: CHUNK,
        call: CALL,
        lane_rows,
        exact_rows: 16,
        marks: random.below(2) == 0,
        page: PAGE,
        shares: true,
        ahead: lane_rows * (1 + random.below(4)),
        reach: REACH,
        bytes: [usize::MAX, 10 * RING, 4 * RING, 2 * RING][random.below(4)],
    }
}

/// How often something has happened: a text was added, gave way, was refused memory, went on from
/// less than was kept, and failed.
fn run(seed: u64, refusals: usize) -> [usize; 5] {
    let mut random = Random(seed);
    let mut world = World::new(seed, limits(&mut random), refusals);
    world.host.device = [usize::MAX, 14 * RING, 5 * RING][random.below(3)];
    let longest = REACH.div_ceil(PAGE);
    world.host.pages = [MANY, 3 * longest, longest + 4, 12][random.below(4)];
    world.ends = true;
    world.kinds = [0, 3, 12][random.below(3)];
    let mut added = 0;
    for _ in 0..40 {
        for _ in 0..random.below(4).saturating_sub(1) * random.below(6) {
            let prompt = [1 + random.below(12), 1 + random.below(200)][random.below(2)];
            let choices = [1, 1, 3][random.below(3)];
            let (more, priority) = (1 + random.below(90), random.below(2) as i64);
            // What can never fit is refused before it comes here.
            let ahead = world.scheduler.limits.ahead;
            let positions = (prompt + ahead).min(prompt + more);
            if positions.div_ceil(PAGE) <= world.host.pages {
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
        page: PAGE,
        shares: true,
        ahead: 2,
        reach: REACH,
        bytes,
    }
}

/// Texts on devices that have all memory but that for more pages.
fn with_pages(pages: usize) -> World {
    let mut world = World::new(0, plain(usize::MAX), 0);
    world.host.pages = pages;
    world
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
    let id = GroupId(0);
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
    // Three texts of five pages each in the end.
    let mut world = with_pages(10);
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
    for pages in [4, 6] {
        let mut world = with_pages(pages);
        let grows = world.add(10, 40, 0);
        let stays = world.add(5, 11, 0);
        world.finish();
        assert_eq!(world.failed, BTreeSet::from([grows]), "{pages} pages");
        assert!(!world.failed.contains(&stays));
    }
}

#[test]
fn a_text_that_gave_way_returns_when_others_have_pages_for_their_next_steps() {
    let mut world = with_pages(10);
    let ids = [12, 13].map(|prompt| world.add(prompt, 60, 0));
    let mut steps = 0;
    while world.preempted == 0 {
        world.step();
        steps += 1;
    }
    let place = |world: &World, id| world.scheduler.place(id);
    assert!(place(&world, ids[0]).is_some() && place(&world, ids[1]).is_none());
    assert!(steps > 20, "both had lanes");
    world.step();
    assert!(place(&world, ids[1]).is_none(), "it would give way at once");
    world.finish();
    assert!(world.failed.is_empty() && world.preempted == 1);
}

#[test]
fn what_is_kept_makes_way_for_texts_and_not_what_they_go_on_from() {
    let mut world = with_pages(12);
    let known = |world: &World, id| world.host.kept.contains_key(&id);
    // Pages of ended texts.
    world
        .host
        .kept
        .extend((100..108).map(|id| (RequestId(id), 40)));
    let id = world.add(60, 4, 0);
    world.host.kept.insert(id, 32);
    world.step();
    // Four of eight pages are those of what is kept.
    assert!(world.texts[&id].pages == 8 && world.texts[&id].own == 4);
    assert!(!known(&world, RequestId(107)) && known(&world, RequestId(100)));
    world.finish();
    assert!(world.failed.is_empty() && world.preempted == 0);
}

#[test]
fn choices_that_share_a_sequence_keep_a_call_to_what_has_the_same_bits() {
    let limits = Limits {
        lane_rows: 3,
        ahead: 6,
        ..plain(usize::MAX)
    };
    let mut world = World::new(0, limits, 0);
    // It leaves a lane, whose steps are exact; those of eight are not.
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
    // A device that says yes, and refuses lanes whenever it is asked for this text.
    let mut world = World::new(0, plain(usize::MAX), 0);
    let first = world.add(6, 30, 0);
    world.step();
    let refused = world.add(40, 4, 0);
    world.refused_text = Some(refused);
    let after = world.add(7, 4, 0);
    world.finish();
    assert!(![first, after].iter().any(|id| world.failed.contains(id)));
    assert!(world.refused > 0 && world.preempted == 0);
    // The lane that the first left is enough.
    assert!(world.failed.is_empty());
    let mut world = World::new(0, plain(usize::MAX), 0);
    let refused = world.add(40, 4, 0);
    world.refused_text = Some(refused);
    world.finish();
    assert_eq!(world.failed, BTreeSet::from([refused]));
}

#[test]
fn prompts_in_progress_stay_when_another_text_is_refused() {
    let mut world = World::new(0, plain(usize::MAX), 0);
    let long = world.add(200, 4, 0);
    world.step();
    assert_eq!(world.scheduler.tasks[0].processed, CHUNK);
    let refused = world.add(40, 4, 1);
    world.refused_text = Some(refused);
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
    let id = GroupId(0);
    let mut world = World::new(0, plain(usize::MAX), 0);
    let first = world.add(5, 12, 0);
    world.step();
    world.host.recorded.insert(id, vec![1, 2, 0]);
    // With one recording there is place for two lanes and a prompt, with three there is none.
    world.host.device = 4 * RING + 2 * RECORDING;
    let second = world.add(6, 8, 0);
    world.step();
    assert_eq!(world.host.recorded[&id], [0], "what is replayed stays");
    assert!(world.scheduler.place(second).is_none());
    world.step();
    assert!(world.scheduler.place(second).is_some());
    assert!(world.scheduler.place(first).is_some() && world.preempted == 0);
    // For want of other bytes, or of pages, none goes.
    for (bytes, pages) in [(2 * RING, MANY), (usize::MAX, 2)] {
        let mut world = World::new(0, plain(bytes), 0);
        world.host.pages = pages;
        world.add(5, 3, 0);
        world.step();
        world.host.recorded.insert(id, vec![1, 2, 0]);
        world.add(6, 8, 0);
        world.step();
        assert_eq!(world.host.recorded[&id], [1, 2, 0]);
        world.finish();
        assert!(world.failed.is_empty());
    }
}

#[test]
fn idle_recordings_stay_where_a_text_waits_for_more_than_they_leave() {
    let id = GroupId(0);
    // A lane, two recordings of which one is idle, and then two lanes and a prompt beside them.
    let enough = RING + RECORDING + 3 * RING;
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
fn recordings_make_way_before_a_text_fails() {
    let mut world = World::new(0, plain(usize::MAX), 0);
    world.add(3, 4, 0);
    world.finish();
    world.host.recorded.insert(GroupId(0), vec![1, 2]);
    world.host.device = 2 * RING + RECORDING;
    world.add(40, 5, 0);
    world.finish();
    assert!(world.failed.is_empty());
}

#[test]
fn there_are_as_many_lanes_as_there_are_pages_for_texts() {
    // Two pages for each of three texts, and one more for each of those that are there.
    for (pages, lanes) in [(MANY, 8), (8, 4)] {
        let mut world = with_pages(pages);
        for _ in 0..8 {
            world.add(10, 3, 0);
        }
        world.host.give_back();
        world.step();
        assert_eq!(world.groups[&GroupId(0)].len(), lanes, "{pages} pages");
        world.finish();
    }
}

#[test]
fn what_a_text_had_generated_returns_in_whole_chunks_where_its_steps_are_not_exact() {
    for (lane_rows, calls) in [(1, 2), (20, 1)] {
        let limits = Limits {
            lane_rows,
            ahead: 2 * lane_rows,
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
