//! A table of an engram.

use std::fmt::Debug;
use std::sync::Arc;

use rayon::prelude::*;

/// What has the rows of a table, in host memory or in a file that is mapped there.
pub trait TableSource: Debug + Send + Sync {
    /// Decodes a row to as many values as it has.
    fn row(&self, row: u64, values: &mut [f32]);
}

/// The table of an engram: rows of one width, which are decoded when they are asked for.
#[derive(Clone, Debug)]
pub struct EngramTable {
    source: Arc<dyn TableSource>,
    width: usize,
}

impl EngramTable {
    /// A table of rows of this width.
    pub fn new(source: impl TableSource + 'static, width: usize) -> Self {
        Self {
            source: Arc::new(source),
            width,
        }
    }

    /// Values of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The rows one after the other, by several threads: a table in a file may have to be read.
    pub fn gather(&self, rows: &[u64]) -> Vec<f32> {
        let mut values = vec![0.0; rows.len() * self.width];
        let places = values.par_chunks_mut(self.width).zip(rows);
        places.for_each(|(values, row)| self.source.row(*row, values));
        values
    }
}
