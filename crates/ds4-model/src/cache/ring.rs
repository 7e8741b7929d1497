use burn::tensor::{Device, Distribution, FloatDType, IndexingUpdateOp, Int, Tensor};

/// Rows of every sequence at fixed slots: `[batch, slots, width]`.
///
/// Row indices address the flattened `[batch · slots]`.
#[derive(Clone, Debug)]
pub(crate) struct Ring {
    /// Taken while they are written, so that the write is in place.
    rows: Option<Tensor<3>>,
    batch: usize,
    slots: usize,
    width: usize,
}

impl Ring {
    pub(crate) fn new(
        batch: usize,
        slots: usize,
        width: usize,
        dtype: FloatDType,
        device: &Device,
    ) -> Self {
        Self {
            rows: Some(Tensor::zeros([batch, slots, width], (device, dtype.into()))),
            batch,
            slots,
            width,
        }
    }

    pub(crate) fn slots(&self) -> usize {
        self.slots
    }

    /// All rows: `[batch, slots, width]`.
    pub(crate) fn all(&self) -> Tensor<3> {
        self.rows.clone().expect("rows are put back after a write")
    }

    /// The rows of the first slots: `[batch, slots, width]`.
    pub(crate) fn first(&self, slots: usize) -> Tensor<3> {
        if slots == self.slots {
            return self.all();
        }
        self.all().narrow(1, 0, slots)
    }

    /// The rows at `indices`: `[indices, width]`.
    pub(crate) fn gather(&self, indices: Tensor<1, Int>) -> Tensor<2> {
        self.all()
            .reshape([self.batch * self.slots, self.width])
            .select(0, indices)
    }

    /// Writes `rows` (`[indices, width]`) at `indices`, which are distinct.
    pub(crate) fn write(&mut self, indices: Tensor<1, Int>, rows: Tensor<2>) {
        let all = self.take();
        let rows = rows.cast(all.dtype());
        let all = all
            .reshape([self.batch * self.slots, self.width])
            .select_assign(0, indices, rows, IndexingUpdateOp::Assign)
            .reshape([self.batch, self.slots, self.width]);
        self.put(all);
    }

    /// Takes the rows for an operation that returns them through [`put`](Self::put), so that it can
    /// update them in place.
    pub(crate) fn take(&mut self) -> Tensor<3> {
        self.rows.take().expect("rows are put back after a write")
    }

    /// Puts back what was [taken](Self::take).
    pub(crate) fn put(&mut self, rows: Tensor<3>) {
        self.rows = Some(rows);
    }

    /// Replaces all rows by random ones.
    pub(crate) fn fill_random(&mut self, distribution: Distribution) {
        let rows = self.take().random_like(distribution);
        self.put(rows);
    }

    /// Adds slots at the end. Rows keep their slots.
    pub(crate) fn grow(&mut self, slots: usize) {
        if slots <= self.slots {
            return;
        }
        let all = self.all();
        let more = Tensor::zeros(
            [self.batch, slots - self.slots, self.width],
            (&all.device(), all.dtype()),
        );
        self.rows = Some(Tensor::cat(vec![all, more], 1));
        self.slots = slots;
    }

    /// Copies so many sequences of `source`, from index `from` to index `to`, as far as both have
    /// slots, and sets the other slots to zero. With `rows`, the slots have these rows of `source`.
    pub(crate) fn adopt(
        &mut self,
        to: usize,
        source: &Self,
        [from, count]: [usize; 2],
        rows: Option<Tensor<1, Int>>,
    ) {
        let (slots, width) = (self.slots, self.width);
        let known = slots.min(source.slots);
        let rows = match rows {
            Some(rows) => source.gather(rows).reshape([count, slots, width]),
            None => source.all().narrow(0, from, count).narrow(1, 0, known),
        };
        let [_, known, _] = rows.dims();
        let rows = match slots - known {
            0 => rows,
            more => {
                let like = (&rows.device(), rows.dtype());
                let none = Tensor::zeros([count, more, width], like);
                Tensor::cat(vec![rows, none], 1)
            }
        };
        let all = self.take();
        self.put(all.slice_assign([to..to + count, 0..slots, 0..width], rows));
    }

    /// Memory for another number of sequences.
    pub(super) fn with_batch(&self, batch: usize) -> Self {
        let all = self.all();
        let shape = [batch, self.slots, self.width];
        Self {
            rows: Some(Tensor::zeros(shape, (&all.device(), all.dtype()))),
            batch,
            ..*self
        }
    }

    /// Bytes of all rows.
    pub(crate) fn bytes(&self) -> usize {
        self.batch * self.slots * self.width * self.all().dtype().size()
    }
}
