//! Linear layers with packed weights, at the sizes of the released models' projections.

use burn::tensor::{DType, Distribution, FloatDType, Tensor};
use burn_ds4_ops::matmul::small_m_matmul_group;
use burn_ds4_ops::quant::{
    Activations, FP4_BLOCK, Weights, quant_linear, quant_linear_group, quant_linear_pair,
};

use super::{
    super::common::values,
    super::drawn::Drawn,
    super::linear::Input,
    super::packing::{FP4, FP8, FP8_BLOCKS32, Format, Packed, REPACKED_FP4, fp8_blocks_of},
    harness::{Case, Prepared},
    small_m::{self, BF16_TO_F32, Products},
};

/// Outputs and inputs.
const SIZES: [(usize, usize); 3] = [(4096, 4096), (32768, 1024), (7168, 2048)];
/// Those of V4.1-Flash by blocks of 32x32: queries, the output projection, and an engram's keys and
/// values.
const BLOCKS32_SIZES: [(usize, usize); 3] = [(32768, 1280), (5120, 8192), (25600, 6144)];
/// The output projection of V4-Flash, whose inputs come to shared memory in parts where there are
/// several rows, and these numbers of rows.
const WIDE: ((usize, usize), [usize; 4]) = ((4096, 8192), [1, 2, 8, 16]);
/// Small, to see whether everything runs.
const SMALL: (usize, usize) = (256, 512);
/// Rows of products that round them.
const RELEASED_ROWS: [usize; 4] = [1, 128, 2048, 4096];
/// Rows of products by FP4 as released files have it.
const PLAIN_ROWS: [usize; 2] = [1, 2048];
const ROWS: [usize; 11] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 2048, 4096];
/// Outputs of both matrices, and inputs: the projections of tokens and of low-rank queries in
/// V4-Flash.
const PAIRS: [([usize; 2], usize); 2] = [([1024, 512], 4096), ([32768, 8192], 1024)];
const SMALL_PAIR: ([usize; 2], usize) = ([128, 64], 512);
const PAIR_ROWS: [usize; 3] = [1, 2, 16];
/// Outputs of the dense matrices beside the first pair: the compressors' projections in a layer
/// with an indexer, and in one without.
const GROUPS: [&[usize]; 2] = [&[2048, 512, 64], &[1024]];
const SMALL_GROUP: &[usize] = &[96, 16];
const GROUP_ROWS: [usize; 4] = [1, 2, 5, 8];
/// Each product in a launch of its own.
const APART: &str = "apart";
/// Rows from which arithmetic may be the bound.
const ARITHMETIC_ROWS: usize = 64;

pub fn cases() -> Vec<Case> {
    let exact = Activations::Exact;
    let released = Activations::Released;
    let variants = [
        ("fp8", FP8, exact, &ROWS[..]),
        ("fp4", REPACKED_FP4, exact, &ROWS[..]),
        ("fp4_plain", FP4, exact, &PLAIN_ROWS[..]),
        ("fp8_released", FP8, released, &RELEASED_ROWS[..]),
        ("fp4_released", REPACKED_FP4, released, &RELEASED_ROWS[..]),
    ];
    let large = variants
        .into_iter()
        .flat_map(|(variant, format, mode, rows)| {
            SIZES.into_iter().flat_map(move |size| {
                let rows = rows.iter();
                rows.map(move |&rows| case(rows, size, (variant, format, mode), FloatDType::BF16))
            })
        });
    let blocks32 = [
        ("fp8_32", exact, &ROWS[..]),
        (
            "fp8_32_released",
            Activations::Released32,
            &RELEASED_ROWS[..],
        ),
    ];
    let blocks32 = blocks32.into_iter().flat_map(|(variant, mode, rows)| {
        BLOCKS32_SIZES.into_iter().flat_map(move |size| {
            let of = (variant, FP8_BLOCKS32, mode);
            rows.iter()
                .map(move |&rows| case(rows, size, of, FloatDType::BF16))
        })
    });
    let (size, rows) = WIDE;
    let wide = rows.map(|rows| case(rows, size, ("fp8", FP8, exact), FloatDType::BF16));
    let small = case(1, SMALL, ("fp4", REPACKED_FP4, exact), FloatDType::F32);
    let pairs = PAIRS.into_iter().flat_map(|size| {
        let variants = ["fp8", APART].into_iter();
        variants.flat_map(move |variant| {
            PAIR_ROWS.map(|rows| pair_case(rows, size, variant, FloatDType::BF16))
        })
    });
    let small_pair = pair_case(1, SMALL_PAIR, "fp8", FloatDType::F32);
    let singles = std::iter::once(small)
        .chain(large)
        .chain(blocks32)
        .chain(wide);
    let groups = GROUPS.into_iter().flat_map(|dense| {
        let variants = ["fp8", APART].into_iter();
        variants.flat_map(move |variant| {
            GROUP_ROWS.map(|rows| group_case(rows, PAIRS[0], dense, variant))
        })
    });
    let small_group = group_case(1, SMALL_PAIR, SMALL_GROUP, "fp8");
    let pairs = std::iter::once(small_pair).chain(pairs);
    let groups = std::iter::once(small_group).chain(groups);
    singles.chain(pairs).chain(groups).collect()
}

fn case(
    rows: usize,
    (outputs, inputs): (usize, usize),
    (variant, format, activations): (&'static str, Format, Activations),
    dtype: FloatDType,
) -> Case {
    let weights = bytes_of_one(format, outputs, inputs);
    let size = DType::from(dtype).size();
    Case {
        op: "quant_linear",
        shape: vec![("M", rows), ("N", outputs), ("K", inputs)],
        variant,
        dtype: dtype.into(),
        bytes: weights + rows * (inputs + outputs) * size,
        flops: (rows >= ARITHMETIC_ROWS).then_some(2 * (rows * outputs * inputs) as u64),
        input_bytes: weights + rows * inputs * size,
        build: Box::new(move |device, seed| {
            let drawn = Drawn::new(format, [1, outputs, inputs], device, seed);
            let uniform = Distribution::Uniform(-1.0, 1.0);
            let x = Tensor::<2>::random([rows, inputs], uniform, (device, DType::F32)).cast(dtype);
            let weights = drawn.weights().with_activations(activations);
            let checked = x.clone();
            Prepared::new(
                move || quant_linear(x.clone(), &weights).expect("a matrix"),
                move |output: Tensor<2>| {
                    check(&checked, &drawn.read(), &output, (variant, activations));
                },
            )
        }),
    }
}

/// Compares the first row and the last.
fn check(
    x: &Tensor<2>,
    matrix: &Packed,
    output: &Tensor<2>,
    (variant, activations): (&str, Activations),
) {
    let [rows, inputs] = x.dims();
    let mut some = vec![0, rows - 1];
    some.dedup();
    for row in some {
        let read = |tensor: &Tensor<2>| {
            let row = tensor.clone().slice_dim(0, row..row + 1);
            values(row.cast(FloatDType::F32))
        };
        let mut x = Input::new([1, inputs], x.dtype().into(), &read(x));
        if let Some(block) = activations.block() {
            x = x.rounded(block);
        }
        x.check(matrix, &read(output), &format!("{variant} row {row}"));
    }
}

/// Two FP8 matrices.
fn pair_case(
    rows: usize,
    (outputs, inputs): ([usize; 2], usize),
    variant: &'static str,
    dtype: FloatDType,
) -> Case {
    let all: usize = outputs.iter().sum();
    let weights: usize = outputs
        .map(|out| bytes_of_one(FP8, out, inputs))
        .iter()
        .sum();
    let size = DType::from(dtype).size();
    Case {
        op: "quant_linear_pair",
        shape: vec![
            ("M", rows),
            ("N", outputs[0]),
            ("N2", outputs[1]),
            ("K", inputs),
        ],
        variant,
        dtype: dtype.into(),
        bytes: weights + rows * (inputs + all) * size,
        flops: None,
        input_bytes: weights + rows * inputs * size,
        build: Box::new(move |device, seed| {
            let drawn = [0, 1].map(|of| {
                let shape = [1, outputs[of], inputs];
                Drawn::new(FP8, shape, device, 2 * seed + of as u32)
            });
            let uniform = Distribution::Uniform(-1.0, 1.0);
            let x = Tensor::<2>::random([rows, inputs], uniform, (device, DType::F32)).cast(dtype);
            let (weights, checked) = (drawn.each_ref().map(Drawn::weights), x.clone());
            Prepared::new(
                move || run_pair(&x, &weights, variant == APART),
                move |(first, second): (Tensor<2>, Tensor<2>)| {
                    for (drawn, output) in drawn.iter().zip([first, second]) {
                        let exact = (variant, Activations::Exact);
                        check(&checked, &drawn.read(), &output, exact);
                    }
                },
            )
        }),
    }
}

fn run_pair(x: &Tensor<2>, [first, second]: &[Weights; 2], apart: bool) -> (Tensor<2>, Tensor<2>) {
    if apart {
        return [first, second]
            .map(|weights| quant_linear(x.clone(), weights).expect("a matrix"))
            .into();
    }
    let products = quant_linear_pair(x.clone(), [first, second]);
    products.expect("matrices").into()
}

/// Two FP8 matrices and some of `bf16`.
fn group_case(
    rows: usize,
    (outputs, inputs): ([usize; 2], usize),
    dense: &'static [usize],
    variant: &'static str,
) -> Case {
    let pair = pair_case(rows, (outputs, inputs), variant, FloatDType::BF16);
    let all: usize = dense.iter().sum();
    let weights = all * inputs * 2;
    let mut shape = pair.shape;
    shape.insert(3, ("dense", all));
    Case {
        op: "quant_linear_group",
        shape,
        bytes: pair.bytes + weights + rows * all * 4,
        input_bytes: pair.input_bytes + weights,
        build: Box::new(move |device, seed| {
            let drawn = [0, 1].map(|of| {
                let shape = [1, outputs[of], inputs];
                Drawn::new(FP8, shape, device, 2 * seed + of as u32)
            });
            let drawn_dense = |rows| small_m::drawn([rows, inputs], FloatDType::BF16, device);
            let x = drawn_dense(rows);
            let dense: Vec<_> = dense.iter().copied().map(drawn_dense).collect();
            let (weights, checked) = (
                drawn.each_ref().map(Drawn::weights),
                (x.clone(), dense.clone()),
            );
            let options = small_m::options(BF16_TO_F32);
            Prepared::new(
                move || {
                    let [first, second] = &weights;
                    let (pair, products) = if variant == APART {
                        let products = small_m_matmul_group(x.clone(), &dense, options);
                        let pair = quant_linear_group(x.clone(), [first, second], &[], options);
                        (pair.expect("matrices").0, products.expect("matrices"))
                    } else {
                        quant_linear_group(x.clone(), [first, second], &dense, options)
                            .expect("matrices")
                    };
                    (<(Tensor<2>, Tensor<2>)>::from(pair), Products(products))
                },
                move |((first, second), products): ((Tensor<2>, Tensor<2>), Products)| {
                    let (x, dense) = &checked;
                    for (drawn, output) in drawn.iter().zip([first, second]) {
                        check(x, &drawn.read(), &output, (variant, Activations::Exact));
                    }
                    for (weights, output) in dense.iter().zip(&products.0) {
                        small_m::check(x, weights, output, BF16_TO_F32);
                    }
                },
            )
        }),
        ..pair
    }
}

/// Bytes that a kernel reads of a matrix.
pub fn bytes_of_one(format: Format, rows: usize, columns: usize) -> usize {
    match format {
        Format::Dense(dtype) => rows * columns * DType::from(dtype).size(),
        Format::Fp8 { parts, block } => {
            let blocks = fp8_blocks_of([1, rows, columns], parts, block);
            let scales: usize = blocks.iter().product();
            rows * columns.next_multiple_of(4) + 4 * scales
        }
        Format::Fp4(_) => rows * (columns.div_ceil(8) * 4 + columns.div_ceil(FP4_BLOCK)),
    }
}
