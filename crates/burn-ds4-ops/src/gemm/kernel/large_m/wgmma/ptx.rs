//! The instructions of Hopper's warpgroup products that CubeCL has no names for.

use cubecl::prelude::*;

/// The address in shared memory that PTX takes.
#[cube]
pub(super) fn shared_address<E: CubePrimitive>(slice: &[E]) -> u32 {
    let y: u32;
    let start = slice.as_ptr();
    gpu_asm!(
        "{{ .reg .b64 t; cvta.to.shared.u64 t, {start}; cvt.u32.u64 {y}, t; }}",
        y = out(_) y, start = in(_) start, options(pure, nomem)
    );
    y
}

/// Initialises a barrier in shared memory whose phases end after `count` arrivals.
#[cube]
pub(super) fn init_barrier(barrier: u32, #[comptime] count: u32) {
    let barrier = i32::reinterpret(barrier);
    gpu_asm!("mbarrier.init.shared::cta.b64 [{barrier}], {count};", barrier = in(_) barrier);
}

/// Waits until the phase of this parity is over.
#[cube]
pub(super) fn wait(barrier: u32, parity: u32) {
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
pub(super) fn is_over(barrier: u32, parity: u32) -> bool {
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

/// Arrives at a barrier, once for each plane.
#[cube]
pub(super) fn arrive(barrier: u32) {
    let barrier = i32::reinterpret(barrier);
    if UNIT_POS % 32 == 0 {
        gpu_asm!("mbarrier.arrive.shared::cta.b64 _, [{barrier}];", barrier = in(_) barrier);
    }
}

/// Arrives at a barrier once all copies that this unit has started are complete.
#[cube]
pub(super) fn arrive_after_copies(barrier: u32) {
    let barrier = i32::reinterpret(barrier);
    gpu_asm!(
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{barrier}];",
        barrier = in(_) barrier
    );
}

/// Starts to copy vector `index` of 16 bytes to an address in shared memory, or zeros where it is
/// not `inside`. The vector must exist in either case.
#[cube]
pub(super) fn copy_vector(to: u32, from: &[Vector<u32, Const<4>>], index: u32, inside: bool) {
    let base = from.as_ptr();
    let to = i32::reinterpret(to);
    let index = i32::reinterpret(index);
    let bytes = i32::reinterpret(select(inside, 16u32, 0u32));
    gpu_asm!(
        "{{ .reg .b64 t; mad.wide.u32 t, {index}, 16, {base}; cvta.to.global.u64 t, t; \
        cp.async.cg.shared.global [{to}], [t], 16, {bytes}; }}",
        base = in(_) base, index = in(_) index, to = in(_) to, bytes = in(_) bytes
    );
}

/// Starts to copy word `index` to an address in shared memory.
#[cube]
pub(super) fn copy_word(to: u32, from: &[Vector<u32, Const<1>>], index: u32) {
    let base = from.as_ptr();
    let to = i32::reinterpret(to);
    let index = i32::reinterpret(index);
    gpu_asm!(
        "{{ .reg .b64 t; mad.wide.u32 t, {index}, 4, {base}; cvta.to.global.u64 t, t; \
        cp.async.ca.shared.global [{to}], [t], 4; }}",
        base = in(_) base, index = in(_) index, to = in(_) to
    );
}

/// Orders what the cube's units have written to shared memory before products that read it.
#[cube]
pub(super) fn fence_shared() {
    gpu_asm!("fence.proxy.async.shared::cta;");
}

/// Orders registers that this unit has written before products that read them.
#[cube]
pub(super) fn fence_registers() {
    gpu_asm!("wgmma.fence.sync.aligned;");
}

/// Closes a group of products.
#[cube]
pub(super) fn commit_products() {
    gpu_asm!("wgmma.commit_group.sync.aligned;");
}

/// Waits until no more than `pending` groups of products are unfinished.
#[cube]
pub(super) fn await_products(#[comptime] pending: u32) {
    gpu_asm!("wgmma.wait_group.sync.aligned {pending};");
}

/// Declares the accumulators of a unit; once in a kernel.
#[cube]
pub(super) fn declare_sums(#[comptime] count: u32) {
    gpu_asm!(".reg .f32 sum<{count}>;");
}

/// An accumulator. No product may be unfinished.
#[cube]
pub(super) fn sum(#[comptime] index: u32) -> f32 {
    let y: f32;
    gpu_asm!("mov.f32 {y}, sum{index};", y = out(_) y, options(nomem));
    y
}

/// The names of the accumulators for tiles of `columns` columns.
fn sums(columns: u32) -> String {
    let names: Vec<String> = (0..columns / 2).map(|i| format!("sum{i}")).collect();
    format!("{{{}}}", names.join(", "))
}

/// Starts the product of 64x16 values of `bf16` in registers, words `4 * product` to
/// `4 * product + 3` of `fragments`, and a tile in shared memory of 16 by `columns`. It is added to
/// the accumulators, or replaces them if `adds` is 0.
///
/// `tile` is the lower word of the descriptor of the tile's rows of 128 bytes, which are swizzled.
#[cube]
pub(super) fn multiply(
    fragments: &Array<u32>,
    #[comptime] product: usize,
    tile: u32,
    adds: u32,
    #[comptime] columns: u32,
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
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {sums}, ",
        "{{{a0}, {a1}, {a2}, {a3}}}, b, p, 1, 1, 0; }}",
        a0 = in(_) a0, a1 = in(_) a1, a2 = in(_) a2, a3 = in(_) a3, tile = in(_) tile,
        adds = in(_) adds, columns = const columns, sums = const sums(columns)
    );
}

/// Lets the units of this warpgroup have `count` registers each. All of a cube's together must be
/// no more than it starts with, or units wait for them without end.
#[cube]
pub(super) fn set_registers(#[comptime] count: u32, #[comptime] more: bool) {
    let direction = comptime!(if more { "inc" } else { "dec" });
    gpu_asm!("setmaxnreg.{direction}.sync.aligned.u32 {count};");
}

/// Transposes an 8x8 tile of 16-bit values. Lane `4 * g + q` holds columns `2q` and `2q + 1` of row
/// `g`.
#[cube]
pub(super) fn transpose_tile(word: u32) -> u32 {
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
pub(super) fn bytes_of(low: u32, high: u32, selector: u32) -> u32 {
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
