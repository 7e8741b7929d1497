//! Matrix products.

use burn::tensor::FloatDType;
use burn_ds4_ops::matmul::{SmallMOptions, matmul as precise_matmul, small_m_matmul_group};

use super::super::common::{read, values};
use super::super::linear::Input;
use super::super::products::Product;
use super::draw::Draw;

pub fn matmul(data: &[u8]) {
    let draw = &mut Draw::new(data);
    let [rows, columns] = [draw.size(5) * draw.pick(&[1, 1, 5]), draw.size(20)];
    let x = draw.rows(rows, columns);
    let dtype = draw.dtype();
    let (tensor, held) = draw.tensor(&x.values, [rows, columns], dtype);
    let options = SmallMOptions {
        f32_output: draw.one_in(2),
        invariant_rows: draw.pick(&[16, 17, 64, 15, 65, usize::MAX]),
    };
    let count = draw.below(3);
    let weights: Vec<_> = (0..count)
        .map(|_| {
            let (out, of) = (draw.size(7), draw.dtype());
            let values = draw.tame_values(out * columns);
            let (tensor, _) = draw.tensor(&values, [out, columns], of);
            (tensor, Input::new([out, columns], of, &values))
        })
        .collect();
    let output = if options.f32_output {
        FloatDType::F32
    } else {
        dtype
    };
    let tensors: Vec<_> = weights.iter().map(|(tensor, _)| tensor.clone()).collect();
    let products = small_m_matmul_group(tensor.clone(), &tensors, options);
    let fits = (16..=64).contains(&options.invariant_rows);
    for (product, (_, weights)) in draw
        .settle(products, fits)
        .into_iter()
        .flatten()
        .zip(weights)
    {
        let [out, _] = weights.shape;
        assert_eq!(
            (product.dims(), product.dtype()),
            ([rows, out], output.into())
        );
        check(&read(&product), &held, &x.tame, (weights, dtype), output);
    }

    let (out, of) = (draw.size(7), draw.pick(&[dtype, dtype, FloatDType::F16]));
    let values_of = draw.tame_values(out * columns);
    let (weight, _) = draw.tensor(&values_of, [out, columns], of);
    let product = precise_matmul(tensor, weight.transpose());
    if let Some(product) = draw.settle(product, of == dtype) {
        assert_eq!(
            (product.dims(), product.dtype()),
            ([rows, out], dtype.into())
        );
        let weights = Input::new([out, columns], of, &values_of);
        let product = values(product.cast(FloatDType::F32));
        check(&product, &held, &x.tame, (weights, dtype), dtype);
    }
}

/// Compares the rows whose values are tame.
fn check(
    actual: &[f32],
    held: &[f32],
    tame: &[bool],
    (weights, dtype): (Input, FloatDType),
    output: FloatDType,
) {
    let [out, columns] = weights.shape;
    for row in (0..tame.len()).filter(|&row| tame[row]) {
        let x = &held[row * columns..][..columns];
        let product = Product {
            x: Input::new([1, columns], dtype, x),
            weights: Input::new([out, columns], weights.dtype, &weights.values),
        };
        product.check(&actual[row * out..][..out], output, "flex");
    }
}
