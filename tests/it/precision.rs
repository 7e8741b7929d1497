//! Other precisions than f32: bf16 activations, and the cache round trips of the released model.

use burn::tensor::{DType, Device, Distribution, FloatDType, Tensor, TensorData};
use burn_ds4_ops::quant::{self, Activations};
use ds4_model::cache::CacheConfig;
use ds4_model::checkpoint::{Checkpoint, CheckpointError, LoadOptions};
use ds4_model::generate::greedy_token;
use ds4_model::model::Model;
use ds4_model::trace::Trace;

use crate::common::{EXACT, absolute, assert_close, devices, seeded, skip, values};
use crate::golden::{Golden, root};

const VOCABULARY: usize = 1024;

fn load(options: &LoadOptions, device: &Device) -> Model {
    let checkpoint =
        Checkpoint::open(&root().join("assets/ds4-tiny")).expect("the asset is a checkpoint");
    checkpoint.load(options, device).expect("the asset loads")
}

fn prompt() -> (Golden, Vec<i32>) {
    let golden = Golden::open("tests/fixtures/ds4-tiny/golden.safetensors");
    let ids = golden.get("medium.input_ids").ids();
    (golden, ids.iter().map(|id| *id as i32).collect())
}

/// Logits of the prompt, fed in chunks.
fn logits(model: &Model, ids: &[i32], chunk: usize, trace: &Trace) -> Vec<f32> {
    let device = model.embedding.val().device();
    let mut cache = model
        .new_cache(CacheConfig::default())
        .expect("defaults are valid");
    ids.chunks(chunk)
        .flat_map(|ids| {
            let ids = Tensor::from_data(TensorData::new(ids.to_vec(), [1, ids.len()]), &device);
            let streams = model
                .forward_streams(ids, &mut cache, trace)
                .expect("the text fits the context");
            values(model.logits(streams))
        })
        .collect()
}

struct Deviation {
    largest: f64,
    mean: f64,
    agreement: f64,
}

fn deviation(actual: &[f32], expected: &[f32]) -> Deviation {
    let errors: Vec<f64> = actual
        .iter()
        .zip(expected)
        .map(|(a, e)| f64::from((a - e).abs()))
        .collect();
    let best = |logits: &[f32]| -> Vec<u32> {
        logits
            .chunks(VOCABULARY)
            .map(|row| greedy_token(row).expect("finite logits"))
            .collect()
    };
    let (actual, expected) = (best(actual), best(expected));
    let same = actual.iter().zip(&expected).filter(|(a, e)| a == e).count();
    Deviation {
        largest: errors.iter().copied().fold(0.0, f64::max),
        mean: errors.iter().sum::<f64>() / errors.len() as f64,
        agreement: same as f64 / expected.len() as f64,
    }
}

#[test]
fn bf16_activations_deviate_as_bf16_does() {
    let (golden, ids) = prompt();
    let expected = golden.get("medium.logits").f32();
    for (name, device) in devices() {
        if !device.supports_dtype(DType::BF16) {
            skip(name, "bf16");
            continue;
        }
        for expand in [false, true] {
            let options = LoadOptions {
                dtype: FloatDType::BF16,
                expand,
                ..LoadOptions::default()
            };
            let model = load(&options, device);
            let actual = logits(&model, &ids, 65, &Trace::off());
            let deviation = deviation(&actual, &expected);
            println!(
                "{name}, expand {expand}: bf16 logits deviate from f32 by at most {:.3}, {:.4} on \
                 average; {:.1} % of the greedy tokens agree",
                deviation.largest,
                deviation.mean,
                100.0 * deviation.agreement
            );
            // Eight bits of mantissa over six layers, and an expert that flips now and then.
            assert!(deviation.mean < 0.1, "{name}: mean {}", deviation.mean);
            assert!(
                deviation.agreement > 0.85,
                "{name}: agreement {}",
                deviation.agreement
            );
            assert!(deviation.largest > 1e-4, "{name}: that was not bf16");
        }
    }
}

#[test]
fn released_activations_are_rounded_before_products_by_fp8_and_fp4_weights() {
    let (golden, ids) = prompt();
    let expected = golden.get("medium.logits").f32();
    let mut first: Option<Vec<f32>> = None;
    for (name, device) in devices() {
        for expand in [false, true] {
            let [exact, released] =
                [Activations::Exact, Activations::Released].map(|activations| {
                    let options = LoadOptions {
                        activations,
                        expand,
                        ..LoadOptions::default()
                    };
                    load(&options, device)
                });
            let of = |model: &Model| model.layers[1].attention.query_a.clone();
            let x = seeded(device, 1, || {
                Tensor::<2>::random([3, 256], Distribution::Normal(0.0, 1.0), device)
            });
            let rounded = quant::fp8_roundtrip(x.clone(), quant::FP8_BLOCK).expect("floats");
            assert_close(
                &values(of(&released).forward(x.clone())),
                &values(of(&exact).forward(rounded)),
                EXACT,
                &format!("{name}, expand {expand}"),
            );
            let layer = &released.layers[1];
            assert_eq!(layer.moe.gate_up.activations, Activations::Released);
            assert_eq!(layer.moe.down.activations, Activations::Released);
            assert_eq!(layer.moe.shared.down.activations, Activations::Released);
            // The release reads this weight in bf16.
            assert_eq!(layer.attention.output_a.activations, Activations::Exact);

            let actual = logits(&released, &ids, 65, &Trace::off());
            let deviation = deviation(&actual, &expected);
            println!(
                "{name}, expand {expand}: released logits deviate from exact ones by at most \
                 {:.3}, {:.4} on average; {:.1} % of the greedy tokens agree",
                deviation.largest,
                deviation.mean,
                100.0 * deviation.agreement
            );
            assert!(deviation.mean < 0.2, "{name}: mean {}", deviation.mean);
            assert!(deviation.largest > 1e-2, "{name}: nothing was rounded");
            // Devices sum in another order, and now and then a number is rounded to its other
            // neighbour. That is much less than what rounding does.
            let first = first.get_or_insert_with(|| actual.clone());
            let between: f64 = std::iter::zip(&actual, first.iter())
                .map(|(a, b)| f64::from((a - b).abs()))
                .sum();
            let between = between / actual.len() as f64;
            assert!(between < deviation.mean / 2.0, "{name}: {between} apart");
        }
    }
}

#[test]
fn a_dtype_that_the_device_lacks_is_a_typed_error() {
    let checkpoint =
        Checkpoint::open(&root().join("assets/ds4-tiny")).expect("the asset is a checkpoint");
    for (name, device) in devices() {
        let options = LoadOptions {
            dtype: FloatDType::BF16,
            ..LoadOptions::default()
        };
        let supported = device.supports_dtype(DType::BF16);
        match checkpoint.load(&options, device) {
            Ok(_) => assert!(supported, "{name}: loaded a dtype it does not support"),
            Err(CheckpointError::UnsupportedDtype { dtype, .. }) => {
                assert!(!supported && dtype == FloatDType::BF16, "{name}");
            }
            Err(error) => panic!("{name}: {error}"),
        }
    }
}

#[test]
fn the_quantized_cache_holds_rounded_rows_and_feeds_in_chunks_alike() {
    let (golden, ids) = prompt();
    let exact = golden.get("medium.logits").f32();
    for (name, device) in devices() {
        let options = LoadOptions {
            quantized_cache: true,
            expand: name == "flex",
            ..LoadOptions::default()
        };
        let model = load(&options, device);
        let trace = Trace::recording();
        let actual = logits(&model, &ids, 65, &trace);
        let rows = trace.take()["layer1.attention.compressed"].clone();
        let rows = Tensor::<3>::from_data(rows, device);
        let config = model.config();
        let content = rows.narrow(2, 0, config.head_dim - config.rope_head_dim);
        let again = quant::fp8_roundtrip(content.clone(), 64).expect("float rows");
        let content = values(content);
        assert!(content.iter().any(|value| *value != 0.0));
        assert_close(
            &values(again),
            &content,
            EXACT,
            &format!("{name}: rows on the FP8 grid"),
        );

        let deviation = deviation(&actual, &exact);
        assert!(deviation.largest > 1e-3, "{name}: nothing was rounded");
        assert!(deviation.mean < 0.2, "{name}: mean {}", deviation.mean);
        assert!(
            deviation.agreement > 0.8,
            "{name}: agreement {}",
            deviation.agreement
        );

        let chunked = logits(&model, &ids, 16, &Trace::off());
        // A value at a rounding boundary may fall to either side; that moves logits by a grid step,
        // not by more.
        let close = chunked
            .iter()
            .zip(&actual)
            .filter(|(a, b)| (*a - *b).abs() < 1e-3)
            .count();
        assert!(
            close * 100 > actual.len() * 95,
            "{name}: {close} of {} logits agree",
            actual.len()
        );
        assert_close(
            &chunked,
            &actual,
            absolute(0.5),
            &format!("{name}: chunked"),
        );
    }
}
