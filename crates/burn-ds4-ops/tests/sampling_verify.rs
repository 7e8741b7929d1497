//! Drafts: those that stand, what corrects them, and that the text is the one without them.

use burn::tensor::{DType, Device, Tensor};
use burn_ds4_ops::sampling::{BatchParams, LaneParams, SamplingParams, accept_drafts, verify};

use super::common::{compiles_slowly, devices, floats, integer_values, integers, noise};
use super::tokens::{Draw, draws, sampled, verdict, verified};

const DRAWN: SamplingParams = SamplingParams {
    temperature: 0.8,
    top_k: 20,
    top_p: 0.95,
    min_p: 0.01,
};

/// A seed of its own for each lane.
fn seeded(positions: &[u32]) -> Vec<Draw> {
    let seeds = (0..).map(|lane: u64| 77 + (lane << 33));
    seeds.zip(positions.iter().copied()).collect()
}

/// Logits of which these are the highest.
fn peaks<const N: usize>(ids: &[[usize; N]], columns: usize, device: &Device) -> Tensor<3> {
    let rows = ids.iter().flatten().flat_map(|&peak| {
        (0..columns).map(move |id| if id == peak { 9.0 } else { (id % 3) as f32 })
    });
    floats(&rows.collect::<Vec<f32>>(), [ids.len(), N, columns], device)
}

fn greedy_drafts_stand_up_to_the_first_that_is_another() {
    for (name, device) in devices() {
        let highest = [[4, 1, 6, 2]; 6];
        let drafts: [[i64; 3]; 6] = [
            [4, 1, 6],
            [4, 1, 5],
            [4, 0, 6],
            [3, 1, 6],
            [4, -1, 6],
            [1 << 30, 1, 6],
        ];
        let (tokens, accepted) = verified(
            peaks(&highest, 7, device),
            drafts.as_flattened(),
            &SamplingParams::default(),
            &seeded(&[0; 6]),
        );
        assert_eq!(accepted, [3, 2, 1, 0, 1, 0], "{name}");
        // The same for tokens that were chosen by other means.
        let chosen = integers(
            highest.map(|row| row.map(|id| id as i64)).as_flattened(),
            [6, 4],
            device,
        );
        let other = accept_drafts(
            chosen.cast(DType::I32),
            integers(drafts.as_flattened(), [6, 3], device),
        );
        let other = verdict(other.expect("arguments that fit"));
        assert_eq!(other, (tokens.clone(), accepted), "{name}");
        let expected: [[i64; 4]; 6] = [
            [4, 1, 6, 2],
            [4, 1, 6, -1],
            [4, 1, -1, -1],
            [4, -1, -1, -1],
            [4, 1, -1, -1],
            [4, -1, -1, -1],
        ];
        assert_eq!(tokens, expected.as_flattened(), "{name}");
    }
}

fn without_drafts_there_is_a_token_for_each_lane() {
    for (name, device) in devices() {
        let logits = peaks(&[[2], [5]], 7, device);
        let draws = seeded(&[0; 2]);
        let verdict = verified(logits, &[], &SamplingParams::default(), &draws);
        assert_eq!(verdict, (vec![2, 5], vec![0, 0]), "{name}");
    }
}

fn a_row_without_candidates_ends_what_stands() {
    for (name, device) in devices() {
        let nothing = floats(&[f32::NAN; 5], [1, 1, 5], device);
        let logits = Tensor::cat(
            vec![peaks(&[[3]], 5, device), nothing, peaks(&[[1]], 5, device)],
            1,
        );
        for sampling in [
            SamplingParams::default(),
            SamplingParams {
                temperature: 1e-3,
                ..DRAWN
            },
        ] {
            let verdict = verified(logits.clone(), &[3, -1], &sampling, &seeded(&[9]));
            assert_eq!(verdict, (vec![3, -1, -1], vec![1]), "{name}, {sampling:?}");
        }
    }
}

fn the_tokens_are_those_that_are_drawn_without_drafts() {
    for (name, device) in devices() {
        let (lanes, rows, columns) = (70, 4, 92);
        let data = noise(lanes * rows * columns, 6);
        let data: Vec<f32> = data.iter().map(|x| 4.0 * x).collect();
        let logits = floats(&data, [lanes, rows, columns], device);
        let positions: Vec<u32> = (0..lanes as u32).map(|i| 1000 * i).collect();
        // One row after the other, each at its own position.
        let steps: Vec<Vec<i64>> = (0..rows)
            .map(|row| {
                let logits = logits.clone().slice([0..lanes, row..row + 1]);
                let at: Vec<u32> = positions.iter().map(|first| first + row as u32).collect();
                sampled(logits.reshape([lanes, columns]), &DRAWN, &seeded(&at))
            })
            .collect();
        // Drafts that are wrong from a place on that differs.
        let drafts: Vec<i64> = (0..lanes)
            .flat_map(|lane| {
                let steps = &steps;
                (0..rows - 1).map(move |row| {
                    let right = steps[row][lane];
                    if row == lane % rows {
                        (right + 1) % columns as i64
                    } else {
                        right
                    }
                })
            })
            .collect();
        let (tokens, accepted) = verified(logits, &drafts, &DRAWN, &seeded(&positions));
        for lane in 0..lanes {
            let stand = lane % rows;
            assert_eq!(accepted[lane], stand as i64, "{name}, {lane}");
            let expected: Vec<i64> = (0..rows)
                .map(|row| if row <= stand { steps[row][lane] } else { -1 })
                .collect();
            assert_eq!(tokens[rows * lane..][..rows], expected, "{name}, {lane}");
        }
    }
}

fn a_draft_stands_as_often_as_its_token_is_probable() {
    for (name, device) in devices() {
        // Probabilities of 0.2, 0.5 and 0.3.
        let row = [2.0_f32, 5.0, 3.0].map(f32::ln);
        // A software device works on one row after the other.
        let lanes = if compiles_slowly(name) { 1000 } else { 4000 };
        // Four standard deviations, at most.
        let allowed = 2.0 / (lanes as f64).sqrt();
        let logits = floats(&row, [1, 1, 3], device).expand([lanes, 2, 3]);
        let sampling = SamplingParams {
            temperature: 1.0,
            ..SamplingParams::default()
        };
        for (draft, probability) in [(0, 0.2), (1, 0.5), (2, 0.3)] {
            let drafts = vec![draft; lanes];
            let draws: Vec<Draw> = draws(5, 0, 2 * lanes).into_iter().step_by(2).collect();
            let (tokens, accepted) = verified(logits.clone(), &drafts, &sampling, &draws);
            let share = accepted.iter().sum::<i64>() as f64 / lanes as f64;
            assert!(
                (share - probability).abs() < allowed,
                "{name}: {share}, {probability}"
            );
            // Corrected or not, a token is as probable as ever.
            let fives = tokens.chunks(2).filter(|pair| pair[0] == 1).count();
            let share = fives as f64 / lanes as f64;
            assert!((share - 0.5).abs() < allowed, "{name}: {share}");
        }
    }
}

fn without_columns_no_draft_stands_and_there_is_no_token() {
    for (name, device) in devices() {
        let params = BatchParams::new(&vec![LaneParams::default(); 3], 0, device);
        let params = params.expect("parameters within their ranges");
        let logits = Tensor::<3>::zeros([3, 3, 0], (device, DType::F32));
        let drafts = integers(&[0, 1, -1, 0, 2, 2], [3, 2], device);
        let positions = integers(&[4, 5, 6], [3], device);
        let verified = verify(logits, drafts, &params, positions).expect("arguments that fit");
        assert_eq!(integer_values(verified.tokens), [-1; 9], "{name}");
        assert_eq!(integer_values(verified.accepted), [0; 3], "{name}");
    }
}

catalogue![
    greedy_drafts_stand_up_to_the_first_that_is_another,
    without_drafts_there_is_a_token_for_each_lane,
    a_row_without_candidates_ends_what_stands,
    without_columns_no_draft_stands_and_there_is_no_token,
    the_tokens_are_those_that_are_drawn_without_drafts,
    a_draft_stands_as_often_as_its_token_is_probable,
];
