//! Everything that a step stores: the bits of the operators for each part of it.

use burn::tensor::{Device, FloatDType, Tensor};
use burn_ds4_ops::attention::{
    Positions, RowRounding, StepCompression, StepRows, StoredStep, store_step,
};

use super::common::{
    assert_on_another_device, devices, every_dtype, floats, some, two_devices, values,
};
use super::storing::{Dtypes, Layer, WINDOW, expect_equal, one_by_one};

const FITS: &str = "arguments that fit";

/// All parts of a step, of a few channels.
const SMALL: Layer = Layer {
    compressed: Some((4, true)),
    indexed: Some(32),
    count: 5,
    ..WINDOW
};
/// With and without compressors, of rows that differ in width; queries of several planes, and more
/// of them than a cube has; more new positions than there are slots, and sizes of the released
/// models. The first has all parts, and every second has others or sizes that others lack.
const LAYERS: [Layer; 7] = [
    Layer {
        rank: 1024,
        width: 512,
        compressed: Some((4, true)),
        indexed: Some(128),
        rounding: RowRounding::Content,
        ..WINDOW
    },
    SMALL,
    WINDOW,
    Layer {
        rank: 1100,
        compressed: Some((3, false)),
        count: 2,
        ..WINDOW
    },
    Layer {
        rank: 7,
        indexed: Some(8),
        count: 3,
        ..WINDOW
    },
    Layer {
        rank: 16,
        compressed: Some((2, true)),
        indexed: Some(64),
        count: 12,
        ..WINDOW
    },
    Layer {
        rank: 1536,
        width: 512,
        compressed: Some((8, false)),
        rounding: RowRounding::Content,
        count: 2,
        ..WINDOW
    },
];
/// Of sequences: one that completes a block, one that is not there, one that begins.
const STARTS: [i64; 3] = [11, -1, 0];

fn empty(shape: [usize; 3]) -> Tensor<3> {
    floats(&[], shape, &Device::flex())
}

fn every_part_has_the_bits_of_its_operator() {
    every_dtype(|name, device, dtype| {
        let step = if dtype == FloatDType::F32 {
            2
        } else {
            LAYERS.len()
        };
        for &layer in some(name, &LAYERS, step) {
            let state = (Dtypes::all(dtype), device);
            let (step, positions) = layer.step(&STARTS, state);
            let expected = one_by_one(step, &positions).expect(FITS);
            let (step, positions) = layer.step(&STARTS, state);
            let stored = store_step(step, positions).expect(FITS);
            expect_equal(&stored, &expected, &format!("{name} {layer:?}"));
            assert_eq!(
                stored.queries.dims(),
                [STARTS.len(), layer.count, layer.rank]
            );
            // The last sequence has stored its rows, the second has not.
            let ring = values(stored.ring);
            let of_sequence = |sequence: usize| {
                let size = layer.slots * layer.width;
                &ring[sequence * size..][..size]
            };
            assert!(of_sequence(1).iter().all(|x| *x == 1.0), "{name} {layer:?}");
            assert!(of_sequence(2).iter().any(|x| *x != 1.0), "{name} {layer:?}");
        }
    });
}

fn parts_may_differ_in_dtype() {
    every_dtype(|name, device, dtype| {
        let f32s = Dtypes::all(FloatDType::F32);
        let parts = [
            Dtypes { x: dtype, ..f32s },
            Dtypes {
                norm: dtype,
                ..f32s
            },
            Dtypes {
                rows: dtype,
                ..f32s
            },
        ];
        // Where kernels compile slowly, no two of the three dtypes are always the same.
        for &dtypes in some(name, &parts, 2) {
            let run = |mixed: bool| {
                let (mut step, positions) = SMALL.step(&STARTS, (dtypes, device));
                if mixed {
                    step.queries.x = step.queries.x.cast(FloatDType::F32);
                    step.new.norm = step.new.norm.cast(FloatDType::F32);
                }
                (step, positions)
            };
            for mixed in [false, true] {
                let (step, positions) = run(mixed);
                let expected = one_by_one(step, &positions).expect(FITS);
                let (step, positions) = run(mixed);
                let stored = store_step(step, positions).expect(FITS);
                expect_equal(&stored, &expected, &format!("{name} {dtypes:?} {mixed}"));
            }
        }
    });
}

fn what_somebody_else_holds_stays_as_it_is() {
    for (name, device) in devices() {
        let (step, positions) = SMALL.step(&STARTS, (Dtypes::all(FloatDType::F32), device));
        let held = step.clone();
        let queries = values(step.queries.x.clone());
        store_step(step, positions).expect(FITS);
        assert_eq!(values(held.queries.x), queries, "{name}");
        let states = [held.compressed, held.indexed].map(|part| part.expect("both").state);
        let states = states.into_iter().flat_map(|state| [state.raw, state.rows]);
        for tensor in [held.ring].into_iter().chain(states) {
            assert!(values(tensor).iter().all(|x| *x == 1.0), "{name}");
        }
    }
}

fn views_are_like_tensors_of_their_own() {
    // With gaps between rows, and from another place on than the beginning.
    fn view(tensor: Tensor<3>) -> Tensor<3> {
        let width = tensor.dims()[2];
        Tensor::cat(vec![tensor.clone() - 1.0, tensor], 2).slice_dim(2, width..2 * width)
    }
    every_dtype(|name, device, dtype| {
        for &layer in some(name, &[LAYERS[0], SMALL], 2) {
            let state = (Dtypes::all(dtype), device);
            let (step, positions) = layer.step(&STARTS, state);
            let expected = store_step(step, positions).expect(FITS);
            let (mut step, positions) = layer.step(&STARTS, state);
            step.queries.x = view(step.queries.x);
            step.new.x = view(step.new.x);
            step.ring = view(step.ring);
            for part in [&mut step.compressed, &mut step.indexed] {
                let part = part.as_mut().expect("both");
                part.inputs.projections = view(part.inputs.projections.clone());
                part.state.raw = view(part.state.raw.clone());
                part.state.rows = view(part.state.rows.clone());
            }
            let stored = store_step(step, positions).expect(FITS);
            expect_equal(&stored, &expected, &format!("{name} {layer:?}"));
        }
    });
}

fn a_nan_reaches_its_own_part_only() {
    for (name, device) in devices() {
        let layer = SMALL;
        let run = |spoil: bool| {
            let (mut step, positions) = layer.step(&STARTS, (Dtypes::all(FloatDType::F32), device));
            if spoil {
                let mut x = values(step.queries.x.clone());
                x[layer.rank + 3] = f32::NAN;
                step.queries.x = floats(&x, step.queries.x.dims(), device);
            }
            store_step(step, positions).expect(FITS)
        };
        let (plain, spoilt) = (run(false), run(true));
        let rows = values(spoilt.queries.clone());
        for (row, (x, plain)) in rows
            .chunks(layer.rank)
            .zip(values(plain.queries.clone()).chunks(layer.rank))
            .enumerate()
        {
            if row == 1 {
                assert!(x.iter().all(|x| x.is_nan()), "{name}");
            } else {
                assert_eq!(x, plain, "{name}: row {row}");
            }
        }
        let queries = plain.queries.clone();
        expect_equal(&StoredStep { queries, ..spoilt }, &plain, name);
    }
}

fn nothing_new_changes_nothing() {
    for (name, device) in devices() {
        let layer = Layer { count: 0, ..SMALL };
        let (step, positions) = layer.step(&STARTS, (Dtypes::all(FloatDType::F32), device));
        let stored = store_step(step, positions).expect(FITS);
        assert_eq!(
            stored.queries.dims(),
            [STARTS.len(), 0, layer.rank],
            "{name}"
        );
        assert!(
            stored.compressed.is_some() && stored.indexed.is_some(),
            "{name}"
        );
        assert!(values(stored.ring).iter().all(|x| *x == 1.0), "{name}");
    }
}

fn what_does_not_fit_is_refused() {
    type Spoil = fn(&mut StepRows, &mut Positions);
    // The host reads positions where they are its own.
    let device = &Device::flex();
    let spoils: [(Spoil, &str); 8] = [
        (
            |step, _| step.queries.x = step.queries.x.clone().narrow(0, 0, 2),
            "`queries.x` has shape [2, 5, 48], expected [3, 5, 48]",
        ),
        (
            |step, _| step.queries.x = empty([3, 5, 0]),
            "`columns of queries.x` is 0, expected at least 1",
        ),
        (
            |step, _| step.queries.norm = step.queries.norm.clone().narrow(0, 0, 47),
            "`queries.norm` has shape [47], expected [48]",
        ),
        (
            |step, _| step.queries.epsilon = -1.0,
            "`queries.epsilon` is -1, expected a number that is not negative",
        ),
        (
            |step, _| step.ring = empty([3, 0, 24]),
            "`slots of ring` is 0, expected at least 1",
        ),
        (
            |step, _| {
                let inputs = &mut step.indexed.as_mut().expect("given").inputs;
                inputs.projections = inputs.projections.clone().narrow(1, 0, 4);
            },
            "`projections` has shape [3, 4, 128], expected [3, 5, 128]",
        ),
        (
            |step, _| {
                let state = &mut step.compressed.as_mut().expect("given").state;
                state.raw = state.raw.clone().narrow(1, 0, 6);
            },
            "`slots of raw` is 6, expected at least 7, which blocks of 4 read back",
        ),
        (
            |_, positions| positions.angles = positions.angles.clone().narrow(0, 0, 15),
            "`last position` is 15, expected less than 15, the positions of angles",
        ),
    ];
    for (spoil, message) in spoils {
        let (mut step, mut positions) = SMALL.step(&STARTS, (Dtypes::all(FloatDType::F32), device));
        spoil(&mut step, &mut positions);
        let error = store_step(step, positions).expect_err(message);
        assert_eq!(error.to_string(), message);
    }
}

#[test]
fn parts_on_two_devices_are_refused() {
    let Some(on) = two_devices() else {
        return;
    };
    type Step = (StepRows, Positions);
    type Spoil = fn(&mut Step, Step);
    fn index(step: &mut Step) -> &mut StepCompression {
        step.0.indexed.as_mut().expect("given")
    }
    let spoils: [(Spoil, [&str; 2]); 9] = [
        (
            |own, other| own.0.new.norm = other.0.new.norm,
            ["norm", "x"],
        ),
        (|own, other| own.0.ring = other.0.ring, ["ring", "x"]),
        (|own, other| own.1.angles = other.1.angles, ["angles", "x"]),
        (|own, other| own.1.start = other.1.start, ["start", "x"]),
        (
            |own, other| own.0.queries.x = other.0.queries.x,
            ["queries.x", "x"],
        ),
        (
            |own, other| own.0.queries.norm = other.0.queries.norm,
            ["queries.norm", "x"],
        ),
        (
            |own, mut other| {
                let theirs = index(&mut other).inputs.projections.clone();
                index(own).inputs.projections = theirs;
            },
            ["projections", "x"],
        ),
        (
            |own, mut other| index(own).inputs.bias = index(&mut other).inputs.bias.clone(),
            ["bias", "rows"],
        ),
        (
            |own, mut other| index(own).state.raw = index(&mut other).state.raw.clone(),
            ["raw", "rows"],
        ),
    ];
    for (spoil, named) in spoils {
        let [mut own, other] =
            on.map(|device| SMALL.step(&STARTS, (Dtypes::all(FloatDType::F32), device)));
        spoil(&mut own, other);
        assert_on_another_device(store_step(own.0, own.1), named);
    }
}

catalogue![
    a_nan_reaches_its_own_part_only,
    every_part_has_the_bits_of_its_operator,
    nothing_new_changes_nothing,
    parts_may_differ_in_dtype,
    views_are_like_tensors_of_their_own,
    what_does_not_fit_is_refused,
    what_somebody_else_holds_stays_as_it_is,
];
