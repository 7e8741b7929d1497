use super::kernel::{
    MarkovBlueprint, MarkovCandidatesLaunch, MarkovOperandsLaunch, MarkovShapeLaunch, UNROLL,
    last_draft_kernel, markov_kernel,
};
use crate::launching::prelude::*;

/// Units of a cube.
const UNITS: u32 = 256;
/// Most texts of a cube: each takes registers.
const CUBE_TEXTS: usize = 4;
/// Most cubes that share the columns: each of the next place's cubes compares their winners.
const MAX_COLUMN_CUBES: usize = 512;
/// Most vectors of a row that a lane keeps.
const MAX_STEPS: usize = 4;

/// Vectors of a row that each lane of a plane reads, and elements of a vector.
fn steps(matrices: [&CubeTensor; 2], plane: u32) -> (usize, usize) {
    let [embedding, output] = matrices;
    let [_, rank] = embedding.dims();
    let size = row_vector_size([embedding, output], rank);
    ((rank / size).div_ceil(plane as usize), size)
}

pub(super) fn can_draft(logits: &CubeTensor, matrices: [&CubeTensor; 2]) -> bool {
    let [texts, places, columns] = logits.dims();
    let [vocabulary, _] = matrices[0].dims();
    let caps = Caps::of(&logits.client);
    caps.plane()
        .is_some_and(|plane| steps(matrices, plane).0 <= MAX_STEPS)
        && caps.cube_units >= UNITS
        && fits_i32(texts.checked_mul(places))
        && fits_i32(texts.checked_mul(2 * MAX_COLUMN_CUBES))
        && fits_i32(Some(columns.max(vocabulary)))
        && texts <= MAX_CUBES
}

pub(super) fn markov_drafts(
    logits: CubeTensor,
    ids: Option<CubeTensor>,
    tokens: CubeTensor,
    matrices: [CubeTensor; 2],
) -> CubeTensor {
    let [texts, places, columns] = logits.dims();
    let (client, caps) = (logits.client.clone(), Caps::of(&logits.client));
    let plane = caps.plane().expect("checked by can_draft");
    let matrices = matrices.map(into_contiguous);
    let (steps, size) = steps([&matrices[0], &matrices[1]], plane);
    let [vocabulary, rank] = matrices[0].dims();
    let [logits, tokens] = [logits, tokens].map(into_contiguous);
    let ids = ids.map(into_contiguous);
    let cube_texts = match ids {
        None => texts.min(CUBE_TEXTS).next_power_of_two(),
        Some(_) => 1,
    };
    let planes = UNITS / plane;
    let blueprint = MarkovBlueprint {
        plane,
        planes,
        steps: steps as u32,
        texts: cube_texts as u32,
        target: caps.target,
    };
    let cubes = columns
        .div_ceil((planes * UNROLL) as usize)
        .min(MAX_COLUMN_CUBES);
    let candidates = |place: usize| {
        let shape = MarkovShapeLaunch::new(
            texts as u32,
            places as u32,
            columns as u32,
            vocabulary as u32,
            (rank / size) as u32,
            place as u32,
            cubes as u32,
        );
        let ids = ids.clone().map(CubeTensor::into_buffer_arg);
        MarkovCandidatesLaunch::new(ids.into(), shape)
    };
    let drafts = output(&logits, [texts, places], DType::I32);
    // Those of a place are read while those of the next are written.
    let winners = [0, 1].map(|_| output(&logits, [2, texts, cubes], DType::U32));
    let [embedding, weight] = &matrices;
    let dtypes = [tokens.dtype, embedding.dtype, weight.dtype].map(dtype_to_storage_type);
    let address = address_type([&logits, embedding, weight]);
    for place in 0..places {
        let (before, own) = (&winners[(place + 1) % 2], &winners[place % 2]);
        let before = (place > 0).then(|| before.clone().into_buffer_arg());
        // SAFETY: texts, columns and vectors past the last are read as one that there is, tokens
        // are clamped to the rows of the matrices, and a cube writes the winners of its texts.
        unsafe {
            markov_kernel::launch_unchecked(
                &client,
                CubeCount::Static(cubes as u32, texts.div_ceil(cube_texts) as u32, 1),
                CubeDim::new_2d(plane, planes),
                address,
                size,
                MarkovOperandsLaunch::new(
                    logits.clone().into_buffer_arg(),
                    tokens.clone().into_buffer_arg(),
                    embedding.clone().into_buffer_arg(),
                    weight.clone().into_buffer_arg(),
                ),
                candidates(place),
                before.into(),
                own.clone().into_buffer_arg(),
                drafts.clone().into_buffer_arg(),
                blueprint,
                dtypes,
            );
        }
    }
    let last = &winners[(places + 1) % 2];
    // SAFETY: a unit takes one text of those there are, and reads as many winners as cubes of the
    // last place have written; ids are clamped to the columns, and it writes the draft of its text.
    unsafe {
        last_draft_kernel::launch_unchecked(
            &client,
            cube_count(&client, texts),
            CubeDim::new_1d(UNITS),
            address,
            candidates(places),
            last.clone().into_buffer_arg(),
            drafts.clone().into_buffer_arg(),
            UNITS,
        );
    }
    drafts
}
