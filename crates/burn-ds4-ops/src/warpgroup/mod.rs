//! Hopper's warpgroup products: the instructions that CubeCL has no names for, and the ring of
//! stages in shared memory that feeds them.

mod ring;

use cubecl::prelude::*;

pub(crate) use ring::{Ring, RingBlueprint};

use crate::caps::Target;
use crate::intrinsics::shuffle_xor;

/// Units of a warpgroup.
pub(crate) const WARPGROUP: u32 = 128;

/// Initialises a barrier in shared memory whose phases end after `count` arrivals.
#[cube]
pub(crate) fn init_barrier(barrier: u32, #[comptime] count: u32) {
    let barrier = i32::reinterpret(barrier);
    gpu_asm!("mbarrier.init.shared::cta.b64 [{barrier}], {count};", barrier = in(_) barrier);
}

/// Says that so many bytes of boxes will land before the phase of a barrier is over. This is no
/// arrival.
#[cube]
pub(crate) fn expect_bytes(barrier: u32, #[comptime] bytes: u32) {
    let barrier = i32::reinterpret(barrier);
    gpu_asm!(
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [{barrier}], {bytes};",
        barrier = in(_) barrier
    );
}

/// Waits until the phase of this parity is over.
#[cube]
pub(crate) fn wait(barrier: u32, parity: u32) {
    let barrier = i32::reinterpret(barrier);
    let parity = i32::reinterpret(parity);
    gpu_asm!(
        "{{ .reg .pred p; ",
        "again: mbarrier.try_wait.parity.shared::cta.b64 p, [{barrier}], {parity}; \
        @!p bra again; }}",
        barrier = in(_) barrier, parity = in(_) parity
    );
}

/// Whether the phase of this parity is over.
#[cube]
pub(crate) fn is_over(barrier: u32, parity: u32) -> bool {
    let y: u32;
    let barrier = i32::reinterpret(barrier);
    let parity = i32::reinterpret(parity);
    gpu_asm!(
        "{{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [{barrier}], {parity}; \
        selp.u32 {y}, 1, 0, p; }}",
        y = out(_) y, barrier = in(_) barrier, parity = in(_) parity
    );
    y != 0
}

/// Arrives at a barrier, once for each plane, after what all of its units have done.
#[cube]
pub(crate) fn arrive(barrier: u32) {
    let barrier = i32::reinterpret(barrier);
    // An instruction of a warpgroup orders no accesses of other units.
    sync_plane();
    if UNIT_POS.is_multiple_of(32) {
        gpu_asm!("mbarrier.arrive.shared::cta.b64 _, [{barrier}];", barrier = in(_) barrier);
    }
}

/// Arrives at a barrier once all copies that this unit has started are complete.
#[cube]
pub(crate) fn arrive_after_copies(barrier: u32) {
    let barrier = i32::reinterpret(barrier);
    gpu_asm!(
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{barrier}];",
        barrier = in(_) barrier
    );
}

/// Starts to copy word `index` to an address in shared memory.
#[cube]
pub(crate) fn copy_word(to: u32, from: &[Vector<u32, Const<1>>], index: u32) {
    let base = from.as_ptr();
    let to = i32::reinterpret(to);
    let index = i32::reinterpret(index);
    gpu_asm!(
        "{{ .reg .b64 t; mad.wide.u32 t, {index}, 4, {base}; cvta.to.global.u64 t, t; \
        cp.async.ca.shared.global [{to}], [t], 4; }}",
        base = in(_) base, index = in(_) index, to = in(_) to
    );
}

/// Stores 16 bytes at an address in shared memory.
#[cube]
pub(crate) fn store_shared(to: u32, words: Vector<u32, Const<4>>) {
    let to = i32::reinterpret(to);
    let w0 = i32::reinterpret(words.extract(0usize));
    let w1 = i32::reinterpret(words.extract(1usize));
    let w2 = i32::reinterpret(words.extract(2usize));
    let w3 = i32::reinterpret(words.extract(3usize));
    gpu_asm!(
        "st.shared.v4.b32 [{to}], {{{w0}, {w1}, {w2}, {w3}}};",
        to = in(_) to, w0 = in(_) w0, w1 = in(_) w1, w2 = in(_) w2, w3 = in(_) w3
    );
}

/// The 16 bits at an address in shared memory.
#[cube]
pub(crate) fn read_half_word(from: u32, #[comptime] offset: u32) -> u32 {
    let y: u32;
    let from = i32::reinterpret(from);
    gpu_asm!("ld.shared.u16 {y}, [{from} + {offset}];", y = out(_) y, from = in(_) from);
    y
}

/// Orders what the cube's units have written to shared memory before products that read it.
#[cube]
pub(crate) fn fence_shared() {
    gpu_asm!("fence.proxy.async.shared::cta;");
}

/// Orders registers that this unit has written before products that read them.
#[cube]
pub(crate) fn fence_registers() {
    gpu_asm!("wgmma.fence.sync.aligned;");
}

/// Closes a group of products.
#[cube]
pub(crate) fn commit_products() {
    gpu_asm!("wgmma.commit_group.sync.aligned;");
}

/// Waits until no more than `pending` groups of products are unfinished.
#[cube]
pub(crate) fn await_products(#[comptime] pending: u32) {
    gpu_asm!("wgmma.wait_group.sync.aligned {pending};");
}

/// Declares the accumulators of a unit; once in a kernel.
#[cube]
pub(crate) fn declare_sums(#[comptime] count: u32) {
    gpu_asm!(".reg .f32 sum<{count}>;");
}

/// Sets the accumulators to zero. No product may be unfinished.
#[cube]
pub(crate) fn clear_sums(#[comptime] count: u32) {
    gpu_asm!("{moves}", moves = const zero_moves(count));
}

/// The instructions of [`clear_sums`].
fn zero_moves(count: u32) -> String {
    let moves = (0..count).map(|i| format!("mov.f32 sum{i}, 0f00000000;"));
    moves.collect::<Vec<_>>().join(" ")
}

/// An accumulator. No product may be unfinished.
#[cube]
pub(crate) fn sum(#[comptime] index: u32) -> f32 {
    let y: f32;
    gpu_asm!("mov.f32 {y}, sum{index};", y = out(_) y, options(nomem));
    y
}

/// Multiplies the accumulators for `columns` columns: those of a lane's row, and those of its row 8
/// below. No product may be unfinished.
#[cube]
pub(crate) fn scale_sums(low: f32, high: f32, #[comptime] columns: u32) {
    gpu_asm!(
        "{{ .reg .f32 low, high; mov.f32 low, {low}; mov.f32 high, {high}; {products} }}",
        low = in(_) low, high = in(_) high, products = const scale_products(columns)
    );
}

/// The instructions of [`scale_sums`].
fn scale_products(columns: u32) -> String {
    let products = (0..columns / 2).map(|i| format!("mul.f32 sum{i}, sum{i}, {};", row_of(i)));
    products.collect::<Vec<_>>().join(" ")
}

/// Declares the accumulators `dots` of a product of two tiles in shared memory; once in a kernel.
#[cube]
pub(crate) fn declare_dots(#[comptime] count: u32, #[comptime] dots: &'static str) {
    gpu_asm!(".reg .f32 {dots}<{count}>;", dots = const dots);
}

/// Such an accumulator. No product may be unfinished.
#[cube]
pub(crate) fn dot(#[comptime] index: u32) -> f32 {
    let y: f32;
    gpu_asm!("mov.f32 {y}, dot{index};", y = out(_) y, options(nomem));
    y
}

/// Adds the accumulators `dots` to those of [`sum()`], times the scale of a lane's row and of its
/// row 8 below. Their product must be finished.
#[cube]
pub(crate) fn add_scaled_dots(
    low: f32,
    high: f32,
    #[comptime] columns: u32,
    #[comptime] dots: &'static str,
) {
    let low = f32::reinterpret(u32::reinterpret(low));
    let high = f32::reinterpret(u32::reinterpret(high));
    gpu_asm!(
        "{{ .reg .f32 low, high; mov.f32 low, {low}; mov.f32 high, {high}; {sums} }}",
        low = in(_) low, high = in(_) high, sums = const scaled_dots(columns, dots),
        options(nomem)
    );
}

/// The instructions of [`add_scaled_dots`].
fn scaled_dots(columns: u32, dots: &str) -> String {
    let sum = |i: u32| {
        let scale = row_of(i);
        format!("fma.rn.f32 sum{i}, {dots}{i}, {scale}, sum{i};")
    };
    (0..columns / 2).map(sum).collect::<Vec<_>>().join(" ")
}

/// The row of a lane that an accumulator is of.
fn row_of(accumulator: u32) -> &'static str {
    ["low", "high"][accumulator as usize / 2 % 2]
}

/// The names of accumulators for tiles of `columns` columns.
fn accumulators(name: &str, columns: u32) -> String {
    let names: Vec<String> = (0..columns / 2).map(|i| format!("{name}{i}")).collect();
    format!("{{{}}}", names.join(", "))
}

/// How the right tile of a product of warpgroups is in shared memory. Either way, rows of 128 bytes
/// are swizzled, and eight of them are 1024 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum TileLayout {
    /// A row has 64 values along K.
    Rows,
    /// A row has 64 columns of the product. The next 64 are in the next tile.
    Columns,
}

impl TileLayout {
    /// What an instruction says of it.
    const fn transposed(self) -> u32 {
        match self {
            Self::Rows => 0,
            Self::Columns => 1,
        }
    }
}

/// The lower word of the descriptor of a tile of rows. Sixteen bytes further, it is one more.
#[cube]
pub(crate) fn rows_descriptor(address: u32) -> u32 {
    (address >> 4) | 0x1_0000u32
}

/// The same of a [`TileLayout::Columns`], where a tile is so many bytes after the one before.
#[cube]
pub(crate) fn columns_descriptor(address: u32, #[comptime] next: u32) -> u32 {
    (address >> 4) | comptime!((next / 16) << 16)
}

/// Starts the product of 64x16 values in registers, words `4 * product` to `4 * product + 3` of
/// `fragments`, and a tile in shared memory of 16 by `columns`. It is added to the accumulators, or
/// replaces them if `adds` is 0.
///
/// `tile` is the lower word of the descriptor of the tile, `dtype` is `bf16` or `f16`.
#[cube]
pub(crate) fn multiply(
    fragments: &Array<u32>,
    #[comptime] product: usize,
    tile: u32,
    adds: u32,
    #[comptime] columns: u32,
    #[comptime] layout: TileLayout,
    #[comptime] dtype: &'static str,
) {
    let first = comptime!(4 * product);
    let a0 = i32::reinterpret(fragments[first]);
    let a1 = i32::reinterpret(fragments[comptime!(first + 1)]);
    let a2 = i32::reinterpret(fragments[comptime!(first + 2)]);
    let a3 = i32::reinterpret(fragments[comptime!(first + 3)]);
    let tile = i32::reinterpret(tile);
    let adds = i32::reinterpret(adds);
    // The upper word says that the rows are swizzled, and that eight of them are 1024 bytes.
    gpu_asm!(
        "{{ .reg .pred p; .reg .b32 high; .reg .b64 b; mov.b32 high, 0x40000040; \
        setp.ne.s32 p, {adds}, 0; mov.b64 b, {{{tile}, high}}; ",
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype} {sums}, ",
        "{{{a0}, {a1}, {a2}, {a3}}}, b, p, 1, 1, {transposed}; }}",
        a0 = in(_) a0, a1 = in(_) a1, a2 = in(_) a2, a3 = in(_) a3, tile = in(_) tile,
        adds = in(_) adds, columns = const columns, dtype = const dtype,
        sums = const accumulators("sum", columns), transposed = const layout.transposed()
    );
}

/// The shape and the types of a product of tiles in shared memory, and what it says of them: that
/// they are not transposed, which only values of 16 bits can be.
fn shared_product(dtype: &str, columns: u32) -> [String; 2] {
    let (k, transposed) = match dtype {
        "e4m3" => (32, ""),
        _ => (16, ", 0, 0"),
    };
    let product = format!("m64n{columns}k{k}.f32.{dtype}.{dtype}");
    [product, transposed.into()]
}

/// Starts the product of tiles in shared memory, 64 and `columns` rows of 32 bytes in `bf16`, `f16`
/// or `e4m3`. It is added to the accumulators `sums`, those of [`sum()`] or of [`dot`], or replaces
/// them if `adds` is 0.
#[cube]
pub(crate) fn multiply_shared(
    left: u32,
    right: u32,
    adds: u32,
    #[comptime] columns: u32,
    #[comptime] sums: &'static str,
    #[comptime] dtype: &'static str,
) {
    let left = i32::reinterpret(left);
    let right = i32::reinterpret(right);
    let adds = i32::reinterpret(adds);
    gpu_asm!(
        "{{ .reg .pred p; .reg .b32 high; .reg .b64 a, b; mov.b32 high, 0x40000040; \
        setp.ne.s32 p, {adds}, 0; mov.b64 a, {{{left}, high}}; mov.b64 b, {{{right}, high}}; ",
        "wgmma.mma_async.sync.aligned.{product} {sums}, a, b, p, 1, 1{transposed}; }}",
        left = in(_) left, right = in(_) right, adds = in(_) adds,
        product = const shared_product(dtype, columns)[0].clone(),
        sums = const accumulators(sums, columns),
        transposed = const shared_product(dtype, columns)[1].clone()
    );
}

/// Lets the units of this warpgroup have `count` registers each. All of a cube's together must be
/// no more than it starts with, or units wait for them without end.
#[cube]
pub(crate) fn set_registers(#[comptime] count: u32, #[comptime] more: bool) {
    let direction = comptime!(if more { "inc" } else { "dec" });
    gpu_asm!("setmaxnreg.{direction}.sync.aligned.u32 {count};");
}

/// Transposes an 8x8 tile of 16-bit values. Lane `4 * g + q` holds columns `2q` and `2q + 1` of row
/// `g`.
#[cube]
pub(crate) fn transpose_tile(word: u32) -> u32 {
    let y: u32;
    let word = i32::reinterpret(word);
    gpu_asm!(
        "movmatrix.sync.aligned.m8n8.trans.b16 {y}, {word};",
        y = out(_) y, word = in(_) word, options(nomem)
    );
    y
}

/// Four bytes of two words, those that the digits of `selector` name.
#[cube]
pub(crate) fn bytes_of(low: u32, high: u32, selector: u32) -> u32 {
    let y: u32;
    let low = i32::reinterpret(low);
    let high = i32::reinterpret(high);
    let selector = i32::reinterpret(selector);
    gpu_asm!(
        "prmt.b32 {y}, {low}, {high}, {selector};",
        y = out(_) y, low = in(_) low, high = in(_) high, selector = in(_) selector,
        options(pure, nomem)
    );
    y
}

/// Of word `i` of lane `j` of four neighbours, makes word `j` of lane `i`.
#[cube]
pub(crate) fn exchange_words(
    words: &mut Array<u32>,
    #[comptime] target: Target,
) -> Vector<u32, Const<4>> {
    #[unroll]
    for i in 0..4usize {
        // Neighbours first, then pairs of them.
        let (low, distance) = comptime!(if i < 2 { (2 * i, 1) } else { (i - 2, 2) });
        let high = comptime!(low + distance);
        let upper = UNIT_POS & comptime!(distance as u32) != 0;
        let sent = f32::reinterpret(select(upper, words[low], words[high]));
        let got = u32::reinterpret(shuffle_xor(sent, comptime!(distance as u32), target));
        words[low] = select(upper, got, words[low]);
        words[high] = select(upper, words[high], got);
    }
    let mut vector = Vector::<u32, Const<4>>::new(0u32);
    #[unroll]
    for i in 0..4usize {
        vector.insert(i, words[i]);
    }
    vector
}
