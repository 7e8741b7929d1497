//! The program of `docs/tutorial.md`: a small language model with a mixture of experts, made of
//! operators and Burn's own tensors.
//!
//!     cargo run --release -p ds4-model --example tutorial -- --save weights.safetensors
//!     cargo run --release --features wgpu -p ds4-model --example tutorial -- \
//!         --load weights.safetensors --device wgpu
//!
//! The weights are random, so that the text is too: the program shows how a model is made, loaded,
//! tested and run on any device.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, Device, Distribution, Int, Tensor, TensorData, s};
use burn_ds4_ops::OpError;
use burn_ds4_ops::attention::{MASKED, WindowKeys, sink_attention};
use burn_ds4_ops::device::DeviceSpec;
use burn_ds4_ops::matmul::{SmallMOptions, small_m_matmul};
use burn_ds4_ops::moe::expert_ffn;
use burn_ds4_ops::norm::rms_norm;
use burn_ds4_ops::quant::Weights;
use burn_ds4_ops::router::dense_router;
use burn_ds4_ops::topk::{Order, Windows, top_k};
use clap::Parser;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

const VOCABULARY: usize = 256;
const D_MODEL: usize = 64;
const HEADS: usize = 4;
const WIDTH: usize = 32;
const SPAN: usize = 16;
const EXPERTS: usize = 8;
const EXPERTS_PER_TOKEN: usize = 2;
const D_EXPERT: usize = 32;
const EPSILON: f64 = 1e-6;

#[derive(Module, Debug)]
struct Attention {
    norm: Param<Tensor<1>>,
    query: Param<Tensor<2>>,
    row: Param<Tensor<2>>,
    sinks: Param<Tensor<1>>,
    output: Param<Tensor<2>>,
}

impl Attention {
    fn forward(&self, x: Tensor<3>) -> Result<Tensor<3>, OpError> {
        let ([batch, positions, _], device) = (x.dims(), x.device());
        let options = SmallMOptions::default();
        let x = rms_norm(x, Some(self.norm.val()), EPSILON)?;
        let queries = small_m_matmul(x.clone(), self.query.val(), options)?;
        let rows = small_m_matmul(x, self.row.val(), options)?;

        // What a query of the first positions would attend to before the text is hidden.
        let before = Tensor::zeros([batch, SPAN - 1, WIDTH], &device);
        let hidden = Tensor::full([batch, SPAN - 1], MASKED, &device);
        let visible = Tensor::zeros([batch, positions], &device);
        let window = WindowKeys {
            rows: Tensor::cat(vec![before, rows], 1),
            bias: Tensor::cat(vec![hidden, visible], 1),
            span: SPAN,
        };
        let queries = queries.reshape([batch, positions, HEADS, WIDTH]);
        let scale = (WIDTH as f64).powf(-0.5);
        let heads = sink_attention(queries, window, None, self.sinks.val(), scale)?;
        let heads = heads.reshape([batch, positions, HEADS * WIDTH]);
        small_m_matmul(heads, self.output.val(), options)
    }
}

#[derive(Module, Debug)]
struct Experts {
    norm: Param<Tensor<1>>,
    gate: Param<Tensor<2>>,
    gate_up: Param<Tensor<3>>,
    down: Param<Tensor<3>>,
}

impl Experts {
    fn forward(&self, x: Tensor<3>) -> Result<Tensor<3>, OpError> {
        let shape = x.dims();
        let x = rms_norm(x, Some(self.norm.val()), EPSILON)?.flatten::<2>(0, 1);
        let gate = self.gate.val();
        let (weights, ids) = dense_router(x.clone(), gate, None, None, EXPERTS_PER_TOKEN, 1.0)?;
        let gate_up = Weights::dense(self.gate_up.val())?;
        let down = Weights::dense(self.down.val())?;
        let sum = expert_ffn(x, ids, weights, &gate_up, &down, None)?;
        Ok(sum.reshape(shape))
    }
}

#[derive(Module, Debug)]
struct Model {
    embedding: Param<Tensor<2>>,
    blocks: Vec<(Attention, Experts)>,
    norm: Param<Tensor<1>>,
}

impl Model {
    /// Logits of the token after each position: `[batch, positions, vocabulary]`.
    fn forward(&self, ids: Tensor<2, Int>) -> Result<Tensor<3>, OpError> {
        let [batch, positions] = ids.dims();
        let embedding = self.embedding.val();
        let x = embedding.clone().select(0, ids.flatten::<1>(0, 1));
        let mut x = x.reshape([batch, positions, D_MODEL]);
        for (attention, experts) in &self.blocks {
            x = x.clone() + attention.forward(x)?;
            x = x.clone() + experts.forward(x)?;
        }
        let x = rms_norm(x, Some(self.norm.val()), EPSILON)?;
        small_m_matmul(x, embedding, SmallMOptions::default())
    }

    /// Continues a text by the most likely tokens.
    fn generate(&self, text: &[i64], count: usize) -> Result<Vec<i64>, Box<dyn Error>> {
        let device = self.embedding.val().device();
        let ids = Tensor::<1, Int>::from_data(text, &device);
        let mut ids = ids.reshape([1, text.len()]);
        for _ in 0..count {
            let last = self.forward(ids.clone())?.slice(s![.., -1..]);
            let (_, next) = top_k(last.flatten(0, 1), Windows::All, 1, Order::Column)?;
            let next = next.cast(ids.dtype());
            ids = Tensor::cat(vec![ids, next], 1);
        }
        Ok(ids.try_into_data()?.iter::<i64>().collect())
    }
}

/// Gives each weight of a model by its name: from a file, or random numbers.
struct Source<'a> {
    device: Device,
    file: Option<SafeTensors<'a>>,
    given: Vec<(String, TensorData)>,
}

impl Source<'_> {
    fn weight<const D: usize>(
        &mut self,
        name: &str,
        shape: [usize; D],
    ) -> Result<Param<Tensor<D>>, Box<dyn Error>> {
        let data = match &self.file {
            None => {
                let deviation = (shape[D - 1] as f64).powf(-0.5);
                let normal = Distribution::Normal(0.0, deviation);
                Tensor::<D>::random(shape, normal, &self.device).try_into_data()?
            }
            Some(file) => {
                let stored = file.tensor(name)?;
                if stored.shape() != shape || stored.dtype() != safetensors::Dtype::F32 {
                    return Err(format!("{name} is not f32 {shape:?}").into());
                }
                TensorData::from_bytes_vec(stored.data().to_vec(), shape, DType::F32)
            }
        };
        self.given.push((name.to_owned(), data.clone()));
        let tensor = Tensor::from_data(data, &self.device);
        Ok(Param::initialized(ParamId::new(), tensor))
    }

    fn attention(&mut self, name: &str) -> Result<Attention, Box<dyn Error>> {
        Ok(Attention {
            norm: self.weight(&format!("{name}.norm"), [D_MODEL])?,
            query: self.weight(&format!("{name}.query"), [HEADS * WIDTH, D_MODEL])?,
            row: self.weight(&format!("{name}.row"), [WIDTH, D_MODEL])?,
            sinks: self.weight(&format!("{name}.sinks"), [HEADS])?,
            output: self.weight(&format!("{name}.output"), [D_MODEL, HEADS * WIDTH])?,
        })
    }

    fn experts(&mut self, name: &str) -> Result<Experts, Box<dyn Error>> {
        Ok(Experts {
            norm: self.weight(&format!("{name}.norm"), [D_MODEL])?,
            gate: self.weight(&format!("{name}.gate"), [EXPERTS, D_MODEL])?,
            gate_up: self.weight(&format!("{name}.gate_up"), [EXPERTS, 2 * D_EXPERT, D_MODEL])?,
            down: self.weight(&format!("{name}.down"), [EXPERTS, D_MODEL, D_EXPERT])?,
        })
    }

    fn model(&mut self, blocks: usize) -> Result<Model, Box<dyn Error>> {
        let mut made = Vec::new();
        for block in 0..blocks {
            let attention = self.attention(&format!("{block}.attention"))?;
            made.push((attention, self.experts(&format!("{block}.experts"))?));
        }
        Ok(Model {
            embedding: self.weight("embedding", [VOCABULARY, D_MODEL])?,
            blocks: made,
            norm: self.weight("norm", [D_MODEL])?,
        })
    }

    /// The weights that were given, as a file.
    fn save(&self) -> Result<Vec<u8>, Box<dyn Error>> {
        let views = self.given.iter().map(|(name, data)| {
            let shape = data.shape().to_vec();
            let view = TensorView::new(safetensors::Dtype::F32, shape, data.as_bytes())?;
            Ok((name.as_str(), view))
        });
        let views: Vec<_> = views.collect::<Result<_, safetensors::SafeTensorError>>()?;
        Ok(safetensors::serialize(views, None)?)
    }
}

/// Makes a small language model of operators, and continues a text with it.
#[derive(Debug, Parser)]
struct Args {
    /// Weights to load; random ones without.
    #[arg(long)]
    load: Option<PathBuf>,
    /// File to write the weights to.
    #[arg(long)]
    save: Option<PathBuf>,
    /// Device: flex (CPU), wgpu, cuda or cuda:INDEX.
    #[arg(long, default_value_t = DeviceSpec::Flex)]
    device: DeviceSpec,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let device = args.device.init()?;
    device.seed(0);
    let bytes = args.load.as_ref().map(std::fs::read).transpose()?;
    let file = bytes.as_deref().map(SafeTensors::deserialize).transpose()?;
    let mut source = Source {
        device,
        file,
        given: Vec::new(),
    };
    let model = source.model(2)?;
    if let Some(path) = &args.save {
        std::fs::write(path, source.save()?)?;
    }
    println!("{} parameters on {}", model.num_params(), args.device);
    println!("{:?}", model.generate(&[72, 101, 108, 108, 111], 8)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random() -> Source<'static> {
        Source {
            device: Device::flex(),
            file: None,
            given: Vec::new(),
        }
    }

    fn numbers<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
        tensor.into_data().iter::<f64>().collect()
    }

    fn dot(a: &[f64], b: &[f64]) -> f64 {
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    }

    /// The layer for one token, in plain loops.
    fn expected(layer: &Experts, x: &[f64]) -> Vec<f64> {
        let square = dot(x, x) / D_MODEL as f64 + EPSILON;
        let norm = numbers(layer.norm.val());
        let x: Vec<f64> = x
            .iter()
            .zip(norm)
            .map(|(x, n)| x * n / square.sqrt())
            .collect();
        let gate = numbers(layer.gate.val());
        let scores = gate
            .chunks(D_MODEL)
            .map(|row| dot(row, &x).exp().ln_1p().sqrt());
        let mut ranked: Vec<(usize, f64)> = scores.enumerate().collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
        ranked.truncate(EXPERTS_PER_TOKEN);
        let total: f64 = ranked.iter().map(|(_, score)| score).sum();

        let (gate_up, down) = (numbers(layer.gate_up.val()), numbers(layer.down.val()));
        let mut sum = vec![0.0; D_MODEL];
        for (expert, score) in ranked {
            let matrix = &gate_up[expert * 2 * D_EXPERT * D_MODEL..][..2 * D_EXPERT * D_MODEL];
            let rows: Vec<f64> = matrix.chunks(D_MODEL).map(|row| dot(row, &x)).collect();
            let (gate, up) = rows.split_at(D_EXPERT);
            let silu = |g: &f64| g / (1.0 + (-g).exp());
            let hidden: Vec<f64> = gate.iter().zip(up).map(|(g, u)| silu(g) * u).collect();
            let matrix = &down[expert * D_MODEL * D_EXPERT..][..D_MODEL * D_EXPERT];
            for (sum, row) in sum.iter_mut().zip(matrix.chunks(D_EXPERT)) {
                *sum += score / total * dot(row, &hidden);
            }
        }
        sum
    }

    #[test]
    fn experts_are_those_of_plain_loops() {
        let mut source = random();
        let layer = source.experts("layer").unwrap();
        let normal = Distribution::Normal(0.0, 1.0);
        let x = Tensor::<3>::random([1, 5, D_MODEL], normal, &source.device);
        let result = numbers(layer.forward(x.clone()).unwrap());
        for (x, result) in numbers(x).chunks(D_MODEL).zip(result.chunks(D_MODEL)) {
            for (result, expected) in result.iter().zip(expected(&layer, x)) {
                assert!((result - expected).abs() < 1e-4, "{result} {expected}");
            }
        }
    }

    #[test]
    fn a_text_does_not_see_what_follows() {
        let model = random().model(2).unwrap();
        let logits = |ids: [i64; 4]| {
            let ids = Tensor::<1, Int>::from_data(ids, &Device::flex());
            numbers(model.forward(ids.reshape([1, 4])).unwrap())
        };
        let (one, other) = (logits([1, 2, 3, 4]), logits([1, 2, 3, 5]));
        let three = 3 * VOCABULARY;
        assert_eq!(one[..three], other[..three]);
        assert_ne!(one[three..], other[three..]);
    }

    #[test]
    fn weights_that_were_saved_give_the_same_text() {
        let mut source = random();
        let model = source.model(2).unwrap();
        let bytes = source.save().unwrap();
        let mut source = Source {
            file: Some(SafeTensors::deserialize(&bytes).unwrap()),
            ..random()
        };
        let loaded = source.model(2).unwrap();
        let texts = [model, loaded].map(|model| model.generate(&[1, 2, 3], 20).unwrap());
        assert_eq!(texts[0], texts[1]);
        let error = source.weight::<1>("norm", [1]).unwrap_err();
        assert_eq!(error.to_string(), "norm is not f32 [1]");
    }

    #[test]
    fn the_tutorial_quotes_this_program() {
        let repository = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
        let read = |path: &str| std::fs::read_to_string(format!("{repository}/{path}")).unwrap();
        let (page, program) = (read("docs/tutorial.md"), read("examples/tutorial.rs"));
        let blocks: Vec<&str> = page.split("```rust\n").skip(1).collect();
        assert!(blocks.len() > 5, "{}", blocks.len());
        for block in blocks {
            let code = block.split("```").next().unwrap_or_default();
            assert!(program.contains(code), "not in the program:\n{code}");
        }
    }
}
