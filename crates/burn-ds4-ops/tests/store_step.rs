//! Everything that a step stores: the bits of the operators for each part of it.

use burn::tensor::{Device, FloatDType, Tensor};
use burn_ds4_ops::attention::{
    CompressorState, LowRankQueries, NewRows, Positions, RowRounding, StepCompression, StepRows,
    StoredStep, append_rows, compress_rows, store_step,
};
use burn_ds4_ops::norm::rms_norm;

use super::common::{devices, every_dtype, floats, noise, read, some, values};
use super::compressing::{Case, EPSILON, Sizes};

const FITS: &str = "arguments that fit";

/// A layer, and a step of it.
#[derive(Clone, Copy, Debug)]
struct Layer {
    /// Of low-rank queries, and of key/value rows.
    rank: usize,
    width: usize,
    slots: usize,
    /// Of its compressors: positions of a block, and whether blocks overlap.
    compressed: Option<(usize, bool)>,
    /// Rows of the indexer's, whose blocks are the same.
    indexed: Option<usize>,
    rounding: RowRounding,
    /// New positions.
    count: usize,
}

const WINDOW: Layer = Layer {
    rank: 48,
    width: 24,
    slots: 9,
    compressed: None,
    indexed: None,
    rounding: RowRounding::None,
    count: 1,
};
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
const POSITIONS: usize = 24;
const ROTATED: usize = 8;

impl Layer {
    fn compressor(&self, width: usize, seed: u32) -> Case {
        let (ratio, overlap) = self.compressed.unwrap_or((4, true));
        let sizes = Sizes {
            batch: STARTS.len(),
            ratio,
            overlap,
            width,
            rotated: ROTATED,
            slots: 2 * ratio + 1,
            positions: POSITIONS,
        };
        Case::new(sizes, seed)
    }

    fn compression(&self, case: &Case, rounding: RowRounding, state: State) -> StepCompression {
        let (dtypes, device) = state;
        let (raw, rows) = case.empty(dtypes.rows, device);
        let mut inputs = case.inputs(&STARTS, self.count, device);
        inputs.norm = inputs.norm.cast(dtypes.norm);
        StepCompression {
            inputs,
            options: case.sizes.options(rounding),
            state: CompressorState { raw, rows },
        }
    }

    fn step(&self, state: State) -> (StepRows, Positions) {
        let (dtypes, device) = state;
        let (batch, count) = (STARTS.len(), self.count);
        let draw = |shape: [usize; 3], seed| {
            floats(&noise(shape.iter().product(), seed), shape, device).cast(dtypes.x)
        };
        let norm = |width, seed| floats(&noise(width, seed), [width], device).cast(dtypes.norm);
        let own = self.compressor(self.width, 21);
        let index = self.compressor(self.indexed.unwrap_or(8), 22);
        let index_rounding = match self.rounding {
            RowRounding::None => RowRounding::None,
            _ => RowRounding::Index,
        };
        let ring = [batch, self.slots, self.width];
        let step = StepRows {
            queries: LowRankQueries {
                x: draw([batch, count, self.rank], 11),
                norm: norm(self.rank, 12),
                epsilon: 1e-5,
            },
            new: NewRows {
                x: draw([batch, count, self.width], 13),
                norm: norm(self.width, 14),
                epsilon: EPSILON,
                rounding: self.rounding,
            },
            ring: Tensor::ones(ring, (device, dtypes.rows.into())),
            compressed: self
                .compressed
                .map(|_| self.compression(&own, self.rounding, state)),
            indexed: self
                .indexed
                .map(|_| self.compression(&index, index_rounding, state)),
        };
        (step, own.positions(&STARTS, device))
    }
}

/// Of what is projected, of what is stored and of the weights of norms.
#[derive(Clone, Copy, Debug)]
struct Dtypes {
    x: FloatDType,
    rows: FloatDType,
    norm: FloatDType,
}

impl Dtypes {
    fn all(dtype: FloatDType) -> Self {
        Self {
            x: dtype,
            rows: dtype,
            norm: dtype,
        }
    }
}

type State<'a> = (Dtypes, &'a Device);

fn empty(shape: [usize; 3]) -> Tensor<3> {
    floats(&[], shape, &devices()[0].1)
}

/// What the operators for each part give.
fn one_by_one(step: StepRows, positions: &Positions) -> StoredStep {
    let queries = step.queries;
    let compress = |part: StepCompression| {
        let CompressorState { raw, rows } = part.state;
        compress_rows(part.inputs, positions.clone(), part.options, raw, rows).expect(FITS)
    };
    StoredStep {
        queries: rms_norm(queries.x, Some(queries.norm), queries.epsilon).expect(FITS),
        ring: append_rows(step.new, positions.clone(), step.ring).expect(FITS),
        compressed: step.compressed.map(compress),
        indexed: step.indexed.map(compress),
    }
}

/// All tensors, by name.
fn tensors(step: &StoredStep) -> Vec<(&'static str, Vec<f32>)> {
    let mut all = vec![("queries", read(&step.queries)), ("ring", read(&step.ring))];
    if let Some(state) = &step.compressed {
        all.extend([("raw", read(&state.raw)), ("rows", read(&state.rows))]);
    }
    if let Some(state) = &step.indexed {
        all.extend([
            ("index raw", read(&state.raw)),
            ("index rows", read(&state.rows)),
        ]);
    }
    all
}

fn expect_equal(actual: &StoredStep, expected: &StoredStep, what: &str) {
    let (actual, expected) = (tensors(actual), tensors(expected));
    assert_eq!(actual.len(), expected.len(), "{what}");
    for ((name, actual), (_, expected)) in actual.into_iter().zip(expected) {
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(actual), bits(expected), "{what}: {name}");
    }
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
            let (step, positions) = layer.step(state);
            let expected = one_by_one(step, &positions);
            let (step, positions) = layer.step(state);
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
                let (mut step, positions) = SMALL.step((dtypes, device));
                if mixed {
                    step.queries.x = step.queries.x.cast(FloatDType::F32);
                    step.new.norm = step.new.norm.cast(FloatDType::F32);
                }
                (step, positions)
            };
            for mixed in [false, true] {
                let (step, positions) = run(mixed);
                let expected = one_by_one(step, &positions);
                let (step, positions) = run(mixed);
                let stored = store_step(step, positions).expect(FITS);
                expect_equal(&stored, &expected, &format!("{name} {dtypes:?} {mixed}"));
            }
        }
    });
}

fn what_somebody_else_holds_stays_as_it_is() {
    for (name, device) in devices() {
        let (step, positions) = SMALL.step((Dtypes::all(FloatDType::F32), device));
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
            let (step, positions) = layer.step(state);
            let expected = store_step(step, positions).expect(FITS);
            let (mut step, positions) = layer.step(state);
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
            let (mut step, positions) = layer.step((Dtypes::all(FloatDType::F32), device));
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
        let (step, positions) = layer.step((Dtypes::all(FloatDType::F32), device));
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
    let (_, device) = &devices()[0];
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
        let (mut step, mut positions) = SMALL.step((Dtypes::all(FloatDType::F32), device));
        spoil(&mut step, &mut positions);
        let error = store_step(step, positions).expect_err(message);
        assert_eq!(error.to_string(), message);
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
