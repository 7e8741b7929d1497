use burn::tensor::{DType, TensorData};
use half::{bf16, f16};

use crate::checkpoint::format::WeightFormat;
use crate::checkpoint::host::LinearStack;
use crate::checkpoint::{HostExperts, HostLinear, Loader, e8m0_to_f32};

use super::{StoredTensor, checkpoint_of, stored, stored_f32};

fn linear(tensors: &[StoredTensor], out: usize, inp: usize) -> HostLinear {
    let checkpoint = checkpoint_of(tensors);
    let mut loader = Loader::new(&checkpoint);
    let linear = loader.linear("w", out, inp);
    loader.finish(linear).unwrap()
}

#[test]
fn e8m0_codes_are_powers_of_two_and_255_is_nan() {
    for code in 0..=254u8 {
        // Every such power is an f32, the smallest a subnormal one, so that the conversion is
        // exact.
        let exact = 2f64.powi(i32::from(code) - 127);
        assert_eq!(f64::from(e8m0_to_f32(code)), exact, "code {code}");
    }
    assert!(e8m0_to_f32(255).is_nan());
    assert_eq!(e8m0_to_f32(127), 1.0);
    assert_eq!(e8m0_to_f32(124), 0.125);
    assert_eq!(e8m0_to_f32(130), 8.0);
}

#[test]
fn fp8_bytes_fill_words_from_the_lowest_and_rows_begin_new_words() {
    let weight = [0x01, 0x02, 0x03, 0x04, 0x05, 0x11, 0x12, 0x13, 0x14, 0x15];
    let packed = linear(
        &[
            stored("w.weight", "F8_E4M3", &[2, 5], &weight),
            stored("w.scale", "F8_E8M0", &[1, 1], &[128]),
        ],
        2,
        5,
    );
    let expected = HostLinear::Fp8 {
        shape: [2, 5],
        words: vec![0x0403_0201, 0x0000_0005, 0x1413_1211, 0x0000_0015],
        scales: vec![2.0],
    };
    assert_eq!(packed, expected);
    assert_eq!(packed.shape(), [2, 5]);
}

#[test]
fn fp8_scales_have_one_entry_per_started_block() {
    let weight = vec![0x38; 129 * 132];
    let packed = linear(
        &[
            stored("w.weight", "F8_E4M3", &[129, 132], &weight),
            stored("w.scale", "F8_E8M0", &[2, 2], &[127, 126, 125, 0]),
        ],
        129,
        132,
    );
    let HostLinear::Fp8 { words, scales, .. } = packed else {
        panic!("{packed:?}");
    };
    assert_eq!(words, vec![0x3838_3838; 129 * 33]);
    assert_eq!(scales, [1.0, 0.5, 0.25, f32::MIN_POSITIVE / 2.0]);
}

#[test]
fn fp8_scales_of_base_models_are_taken_as_they_are() {
    let packed = linear(
        &[
            stored("w.weight", "F8_E4M3", &[1, 4], &[1, 2, 3, 4]),
            stored_f32("w.scale", &[1, 1], &[0.3]),
        ],
        1,
        4,
    );
    let expected = HostLinear::Fp8 {
        shape: [1, 4],
        words: vec![0x0403_0201],
        scales: vec![0.3],
    };
    assert_eq!(packed, expected);
}

#[test]
fn fp4_nibbles_fill_words_from_the_lowest() {
    // Low nibble first: the codes of the row are 1, 2, 3, ..., 15, 0, 1, ... in column order.
    let row: Vec<u8> = (0..16u8)
        .map(|byte| {
            let low = (2 * byte + 1) & 15;
            let high = (2 * byte + 2) & 15;
            low | high << 4
        })
        .collect();
    let weight = [row.clone(), row].concat();
    let packed = linear(
        &[
            stored("w.weight", "I8", &[2, 16], &weight),
            stored("w.scale", "F8_E8M0", &[2, 1], &[0x70, 0x81]),
        ],
        2,
        32,
    );
    let row = [0x8765_4321, 0x0fed_cba9, 0x8765_4321, 0x0fed_cba9];
    let expected = HostLinear::Fp4 {
        shape: [2, 32],
        words: [row, row].concat(),
        // Two scales and two bytes of padding.
        scales: vec![0x7f7f_8170],
    };
    assert_eq!(packed, expected);
}

#[test]
fn fp4_rows_are_filled_up_with_zero_codes() {
    // Five columns: three bytes, the last high nibble is no column.
    let weight = [0x21, 0x43, 0xf5, 0xa9, 0xcb, 0xfd];
    let packed = linear(
        &[
            stored("w.weight", "I8", &[2, 3], &weight),
            stored("w.scale", "F8_E8M0", &[2, 1], &[1, 2]),
        ],
        2,
        5,
    );
    let expected = HostLinear::Fp4 {
        shape: [2, 5],
        words: vec![0x0005_4321, 0x000d_cba9],
        scales: vec![0x7f7f_0201],
    };
    assert_eq!(packed, expected);
}

#[test]
fn dense_weights_keep_their_type() {
    let values = [1.5f32, -0.25, 3.0, 0.0, 8.0, -2.0];
    let bf16s = values.map(bf16::from_f32);
    let f16s = values.map(f16::from_f32);
    let bytes_of = |bits: [u16; 6]| bits.map(u16::to_le_bytes).concat();
    let cases = [
        (
            stored_f32("w.weight", &[2, 3], &values),
            TensorData::new(values.to_vec(), [2, 3]),
        ),
        (
            stored(
                "w.weight",
                "BF16",
                &[2, 3],
                &bytes_of(bf16s.map(bf16::to_bits)),
            ),
            TensorData::new(bf16s.to_vec(), [2, 3]),
        ),
        (
            stored(
                "w.weight",
                "F16",
                &[2, 3],
                &bytes_of(f16s.map(f16::to_bits)),
            ),
            TensorData::new(f16s.to_vec(), [2, 3]),
        ),
    ];
    for (tensor, expected) in cases {
        let packed = linear(std::slice::from_ref(&tensor), 2, 3);
        assert_eq!(packed, HostLinear::Dense(expected.clone()));
        assert_eq!(packed.shape(), [2, 3]);

        let checkpoint = checkpoint_of(&[tensor]);
        let mut loader = Loader::new(&checkpoint);
        let dense = loader.dense("w.weight", &[2, 3]);
        assert_eq!(loader.finish(dense).unwrap(), expected);
    }
}

#[test]
fn dense_tensors_may_have_any_rank() {
    let checkpoint = checkpoint_of(&[
        stored_f32("vector", &[3], &[1.0, 2.0, 3.0]),
        stored_f32("cube", &[1, 2, 1], &[4.0, 5.0]),
    ]);
    let mut loader = Loader::new(&checkpoint);
    let vector = loader.dense("vector", &[3]);
    let cube = loader.dense("cube", &[1, 2, 1]);
    let (vector, cube) = loader.finish(vector.zip(cube)).unwrap();
    assert_eq!(vector, TensorData::new(vec![1f32, 2.0, 3.0], [3]));
    assert_eq!(cube, TensorData::new(vec![4f32, 5.0], [1, 2, 1]));
    assert_eq!(cube.dtype(), DType::F32);
}

#[test]
fn ids_of_both_widths_become_i32() {
    let long: Vec<u8> = [0i64, 3, 1, 2]
        .iter()
        .flat_map(|id| id.to_le_bytes())
        .collect();
    let short: Vec<u8> = [0i32, 3, 1, 2]
        .iter()
        .flat_map(|id| id.to_le_bytes())
        .collect();
    for tensor in [
        stored("ids", "I64", &[2, 2], &long),
        stored("ids", "I32", &[2, 2], &short),
    ] {
        let checkpoint = checkpoint_of(&[tensor]);
        let mut loader = Loader::new(&checkpoint);
        let ids = loader.ids("ids", &[2, 2], 4);
        assert_eq!(loader.finish(ids).unwrap(), [0, 3, 1, 2]);
    }
}

/// Two experts of width 2 in, 3 inner, their elements numbered.
fn dense_experts() -> Vec<StoredTensor> {
    let six = |first: u8| (0..6).map(|i| f32::from(first + i)).collect::<Vec<_>>();
    vec![
        stored_f32("ffn.experts.0.w1.weight", &[3, 2], &six(0)),
        stored_f32("ffn.experts.0.w3.weight", &[3, 2], &six(10)),
        stored_f32("ffn.experts.1.w1.weight", &[3, 2], &six(20)),
        stored_f32("ffn.experts.1.w3.weight", &[3, 2], &six(30)),
        stored_f32("ffn.experts.0.w2.weight", &[2, 3], &six(40)),
        stored_f32("ffn.experts.1.w2.weight", &[2, 3], &six(50)),
    ]
}

fn experts(
    tensors: &[StoredTensor],
    experts: usize,
    inter: usize,
    hidden: usize,
) -> (HostExperts, HostExperts) {
    let checkpoint = checkpoint_of(tensors);
    let mut loader = Loader::new(&checkpoint);
    let gate_up = loader.experts_gate_up("ffn.experts", experts, inter, hidden);
    let down = loader.experts_down("ffn.experts", experts, hidden, inter);
    loader.finish(gate_up.zip(down)).unwrap()
}

#[test]
fn gate_rows_lie_above_up_rows_in_each_expert() {
    let (gate_up, down) = experts(&dense_experts(), 2, 3, 2);
    let numbered = |firsts: &[u8]| -> Vec<f32> {
        firsts
            .iter()
            .flat_map(|&first| (0..6).map(move |i| f32::from(first + i)))
            .collect()
    };
    assert_eq!(gate_up.shape(), [2, 6, 2]);
    assert_eq!(
        gate_up,
        HostExperts::Dense(TensorData::new(numbered(&[0, 10, 20, 30]), [2, 6, 2]))
    );
    assert_eq!(
        down,
        HostExperts::Dense(TensorData::new(numbered(&[40, 50]), [2, 2, 3]))
    );
}

#[test]
fn an_expert_without_a_number_is_a_stack_of_one() {
    let checkpoint = checkpoint_of(&[
        stored_f32("shared.w1.weight", &[2, 2], &[0.0, 1.0, 2.0, 3.0]),
        stored_f32("shared.w3.weight", &[2, 2], &[4.0, 5.0, 6.0, 7.0]),
        stored_f32("shared.w2.weight", &[2, 2], &[8.0, 9.0, 10.0, 11.0]),
    ]);
    let mut loader = Loader::new(&checkpoint);
    let gate_up = loader.expert_gate_up("shared", 2, 2);
    let down = loader.linear("shared.w2", 2, 2).map(HostExperts::from);
    let (gate_up, down) = loader.finish(gate_up.zip(down)).unwrap();
    let numbered = |range: std::ops::Range<u8>, shape: [usize; 3]| {
        let values: Vec<f32> = range.map(f32::from).collect();
        HostExperts::Dense(TensorData::new(values, shape))
    };
    assert_eq!(gate_up, numbered(0..8, [1, 4, 2]));
    assert_eq!(down, numbered(8..12, [1, 2, 2]));
}

#[test]
fn a_packed_linear_is_a_stack_of_one_with_one_part() {
    let (words, scales) = (vec![1, 2, 3], vec![4]);
    let shape = [3, 2];
    let fp8 = HostLinear::Fp8 {
        shape,
        words: words.clone(),
        scales: vec![0.5],
    };
    let expected = HostExperts::Fp8 {
        shape: [1, 3, 2],
        parts: 1,
        words: words.clone(),
        scales: vec![0.5],
    };
    assert_eq!(HostExperts::from(fp8), expected);
    let fp4 = HostLinear::Fp4 {
        shape,
        words: words.clone(),
        scales: scales.clone(),
    };
    let expected = HostExperts::Fp4 {
        shape: [1, 3, 2],
        words,
        scales,
    };
    assert_eq!(HostExperts::from(fp4), expected);
}

#[test]
fn fp8_experts_keep_the_blocks_of_gate_and_up_apart() {
    let mut tensors = Vec::new();
    for (expert, leaf, code, scale) in [
        (0, "w1", 0x01, 121),
        (0, "w3", 0x02, 122),
        (1, "w1", 0x03, 123),
        (1, "w3", 0x04, 124),
    ] {
        let prefix = format!("ffn.experts.{expert}.{leaf}");
        tensors.push(stored(
            &format!("{prefix}.weight"),
            "F8_E4M3",
            &[130, 4],
            &[code; 520],
        ));
        tensors.push(stored(
            &format!("{prefix}.scale"),
            "F8_E8M0",
            &[2, 1],
            &[scale, scale + 4],
        ));
    }
    for expert in 0..2 {
        let prefix = format!("ffn.experts.{expert}.w2");
        tensors.push(stored(
            &format!("{prefix}.weight"),
            "F8_E4M3",
            &[4, 130],
            &[5; 520],
        ));
        tensors.push(stored(
            &format!("{prefix}.scale"),
            "F8_E8M0",
            &[1, 2],
            &[127, 128],
        ));
    }
    let (gate_up, down) = experts(&tensors, 2, 130, 4);
    let mut words = vec![0x0101_0101; 130];
    words.extend([0x0202_0202; 130]);
    words.extend([0x0303_0303; 130]);
    words.extend([0x0404_0404; 130]);
    let expected = HostExperts::Fp8 {
        shape: [2, 260, 4],
        parts: 2,
        words,
        scales: [121, 125, 122, 126, 123, 127, 124, 128]
            .map(e8m0_to_f32)
            .to_vec(),
    };
    assert_eq!(gate_up, expected);
    let HostExperts::Fp8 {
        shape,
        parts,
        words,
        scales,
    } = down
    else {
        panic!("{down:?}");
    };
    assert_eq!((shape, parts), ([2, 4, 130], 1));
    let row = [vec![0x0505_0505; 32], vec![0x0000_0505]].concat();
    assert_eq!(words, row.repeat(8));
    assert_eq!(scales, [1.0, 2.0, 1.0, 2.0]);
}

#[test]
fn fp4_scales_of_experts_follow_each_other_without_gaps() {
    let mut tensors = Vec::new();
    for expert in 0..3u8 {
        for (leaf, code) in [("w1", 0x10), ("w3", 0x20)] {
            let prefix = format!("ffn.experts.{expert}.{leaf}");
            let scale = code + expert;
            tensors.push(stored(
                &format!("{prefix}.weight"),
                "I8",
                &[1, 16],
                &[scale; 16],
            ));
            tensors.push(stored(
                &format!("{prefix}.scale"),
                "F8_E8M0",
                &[1, 1],
                &[scale],
            ));
        }
        let prefix = format!("ffn.experts.{expert}.w2");
        tensors.push(stored(
            &format!("{prefix}.weight"),
            "I8",
            &[32, 1],
            &[0x07; 32],
        ));
        tensors.push(stored(
            &format!("{prefix}.scale"),
            "F8_E8M0",
            &[32, 1],
            &[127; 32],
        ));
    }
    let (gate_up, down) = experts(&tensors, 3, 1, 32);
    let row = |byte: u32| [byte * 0x0101_0101; 4];
    let expected = HostExperts::Fp4 {
        shape: [3, 2, 32],
        words: [0x10, 0x20, 0x11, 0x21, 0x12, 0x22].map(row).concat(),
        scales: vec![0x2111_2010, 0x7f7f_2212],
    };
    assert_eq!(gate_up, expected);
    let expected = HostExperts::Fp4 {
        shape: [3, 32, 1],
        words: vec![0x07; 96],
        scales: vec![0x7f7f_7f7f; 24],
    };
    assert_eq!(down, expected);
}

#[test]
fn a_stack_that_memory_cannot_hold_is_an_error() {
    for format in [
        WeightFormat::Bf16,
        WeightFormat::F16,
        WeightFormat::F32,
        WeightFormat::Fp8ScaledE8m0,
        WeightFormat::Fp8ScaledF32,
        WeightFormat::Fp4,
    ] {
        for side in [1 << 30, usize::MAX] {
            assert!(LinearStack::zeros(format, 1 << 20, [side, side]).is_none());
        }
    }
}
