//! Drafts: those that stand, what corrects them, and that the text is the one without them.

use burn::tensor::{DType, Device, Tensor};
use burn_ds4_ops::sampling::{
    Draws, SamplingParams, VerifiedDrafts, accept_drafts, seed_words, verify,
};

use super::common::{devices, floats, integer_values, integers, noise};
use super::tokens::sampled;

const DRAWN: SamplingParams = SamplingParams {
    temperature: 0.8,
    top_k: 20,
    top_p: 0.95,
    min_p: 0.01,
};

fn draws(positions: &[i64], device: &Device) -> Draws {
    let seeds: Vec<u64> = (0..positions.len() as u64)
        .map(|i| 77 + (i << 33))
        .collect();
    Draws {
        seeds: seed_words(&seeds, device),
        positions: integers(positions, [positions.len()], device),
    }
}

fn read(verdict: VerifiedDrafts) -> (Vec<i64>, Vec<i64>) {
    (
        integer_values(verdict.tokens),
        integer_values(verdict.accepted),
    )
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
        let verdict = verify(
            peaks(&highest, 7, device),
            integers(drafts.as_flattened(), [6, 3], device),
            &SamplingParams::default(),
            draws(&[0; 6], device),
        );
        let (tokens, accepted) = read(verdict.expect("arguments that fit"));
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
        let other = read(other.expect("arguments that fit"));
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

fn without_drafts_there_is_a_token_for_each_sequence() {
    for (name, device) in devices() {
        let drafts = Tensor::zeros([2, 0], device);
        let logits = peaks(&[[2], [5]], 6, device);
        let verdict = verify(
            logits,
            drafts,
            &SamplingParams::default(),
            draws(&[0; 2], device),
        );
        let verdict = verdict.expect("arguments that fit");
        assert_eq!(verdict.tokens.dims(), [2, 1], "{name}");
        assert_eq!(read(verdict), (vec![2, 5], vec![0, 0]), "{name}");
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
            let drafts = integers(&[3, -1], [1, 2], device);
            let verdict = verify(logits.clone(), drafts, &sampling, draws(&[9], device));
            let result = read(verdict.expect("arguments that fit"));
            assert_eq!(result, (vec![3, -1, -1], vec![1]), "{name}, {sampling:?}");
        }
    }
}

fn the_tokens_are_those_that_are_drawn_without_drafts() {
    for (name, device) in devices() {
        let (sequences, rows, columns) = (70, 4, 90);
        let data = noise(sequences * rows * columns, 6);
        let data: Vec<f32> = data.iter().map(|x| 4.0 * x).collect();
        let logits = floats(&data, [sequences, rows, columns], device);
        let positions: Vec<i64> = (0..sequences as i64).map(|i| 1000 * i).collect();
        // One row after the other, each at its own position.
        let steps: Vec<Vec<i64>> = (0..rows)
            .map(|row| {
                let logits = logits.clone().slice([0..sequences, row..row + 1]);
                let at: Vec<i64> = positions.iter().map(|first| first + row as i64).collect();
                sampled(
                    logits.reshape([sequences, columns]),
                    &DRAWN,
                    draws(&at, device),
                )
            })
            .collect();
        // Drafts that are wrong from a place on that differs.
        let drafts: Vec<i64> = (0..sequences)
            .flat_map(|sequence| {
                let steps = &steps;
                (0..rows - 1).map(move |row| {
                    let right = steps[row][sequence];
                    if row == sequence % rows {
                        (right + 1) % columns as i64
                    } else {
                        right
                    }
                })
            })
            .collect();
        let verdict = verify(
            logits,
            integers(&drafts, [sequences, rows - 1], device),
            &DRAWN,
            draws(&positions, device),
        );
        let (tokens, accepted) = read(verdict.expect("arguments that fit"));
        for sequence in 0..sequences {
            let stand = sequence % rows;
            assert_eq!(accepted[sequence], stand as i64, "{name}, {sequence}");
            let expected: Vec<i64> = (0..rows)
                .map(|row| {
                    if row <= stand {
                        steps[row][sequence]
                    } else {
                        -1
                    }
                })
                .collect();
            assert_eq!(
                tokens[rows * sequence..][..rows],
                expected,
                "{name}, {sequence}"
            );
        }
    }
}

fn a_draft_stands_as_often_as_its_token_is_probable() {
    for (name, device) in devices() {
        // Probabilities of 0.2, 0.5 and 0.3.
        let row = [2.0_f32, 5.0, 3.0].map(f32::ln);
        let sequences = 4000;
        let logits = floats(&row, [1, 1, 3], device).expand([sequences, 2, 3]);
        let sampling = SamplingParams {
            temperature: 1.0,
            ..SamplingParams::default()
        };
        for (draft, probability) in [(0, 0.2), (1, 0.5), (2, 0.3)] {
            let drafts = integers(&vec![draft; sequences], [sequences, 1], device);
            let positions: Vec<i64> = (0..sequences as i64).map(|i| 2 * i).collect();
            let draws = Draws {
                seeds: seed_words(&vec![5; sequences], device),
                positions: integers(&positions, [sequences], device),
            };
            let verdict = verify(logits.clone(), drafts, &sampling, draws);
            let (tokens, accepted) = read(verdict.expect("arguments that fit"));
            let share = accepted.iter().sum::<i64>() as f64 / sequences as f64;
            // Four standard deviations.
            assert!(
                (share - probability).abs() < 0.032,
                "{name}: {share}, {probability}"
            );
            // Corrected or not, a token is as probable as ever.
            let fives = tokens.chunks(2).filter(|pair| pair[0] == 1).count();
            let share = fives as f64 / sequences as f64;
            assert!((share - 0.5).abs() < 0.032, "{name}: {share}");
        }
    }
}

catalogue![
    greedy_drafts_stand_up_to_the_first_that_is_another,
    without_drafts_there_is_a_token_for_each_sequence,
    a_row_without_candidates_ends_what_stands,
    the_tokens_are_those_that_are_drawn_without_drafts,
    a_draft_stands_as_often_as_its_token_is_probable,
];
