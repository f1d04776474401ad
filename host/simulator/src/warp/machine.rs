//! A warp as the protocol's machine.

use std::cell::Cell;
use std::mem::offset_of;

use ferry_layout::{
    Args, ByteOffset, Counter, Fault, FaultKind, FaultPage, LastRecord, Rank, Signal, Table,
    Tensor, TokenFormat, avoid_sentinel, bf16_bits, f32_of_bf16_bits,
};
use ferry_protocol::wire::inline;
use ferry_protocol::{
    Bits, BlockCounter, ByteRange, Finish, LANES, Machine, OutputRow, Put, Puts, Row, Signals,
    Tiles, TimedOut, TokenPart, WarpPosition,
};

use super::Warp;
use super::tiles::Vector;
use crate::write::Polled;

/// Vectors of a lane in a copied tile, as on a GPU.
const COPY_DEPTH: usize = 7;

/// Replaces words that are the sentinel.
fn all_sent(bytes: &[u8]) -> Vec<u8> {
    let words = bytes.as_chunks().0.iter();
    words
        .flat_map(|&word| avoid_sentinel(u32::from_le_bytes(word)).to_le_bytes())
        .collect()
}

impl Machine for Warp<'_> {
    type Lanes<T: Copy> = [T; LANES as usize];
    type Ahead = [Vector; COPY_DEPTH];
    type Loading = ();

    fn begin(&self) {}

    /// Does nothing: each launch has new blocks, which are clear.
    fn clear_block(&self) {}

    fn ask_credits(&self, _loading: &mut ()) {
        let credit = |rank| self.load_signal(self.common.window.credit(Rank(rank)));
        // All warps of a block ask before one of them goes on.
        let credits = &self.block.credits;
        credits.get_or_init(|| (0..self.ranks()).map(credit).collect());
    }

    fn peek_credit(&self, rank: Rank) -> u64 {
        self.block
            .credits
            .get()
            .map_or(0, |credits| credits[rank.0 as usize])
    }

    fn keep(&self, _loading: ()) {}

    fn ranks(&self) -> u32 {
        self.common.shape.ranks
    }

    fn keeps_rows(&self) -> bool {
        match &*self.args {
            Args::Dispatch(with) => with.options.rows.is_on != 0,
            Args::Combine(with) => with.options.rows.is_on != 0,
            Args::Counts(args) => args.keeps_rows != 0,
            Args::GiveUp(args) => args.layout != 0,
            Args::Links(_) | Args::Silu(_) => false,
        }
    }

    fn spans_nodes(&self) -> bool {
        self.common.shape.spans_nodes()
    }

    fn rank(&self) -> Rank {
        self.common.rank()
    }

    fn warp_position(&self) -> WarpPosition {
        WarpPosition {
            index: self.number / self.blocks,
            in_block: self.warps / self.blocks,
            block: self.number % self.blocks,
            blocks: self.blocks,
        }
    }

    fn arrives_last(&self, block_counter: BlockCounter, callers: u32) -> bool {
        self.release_own();
        self.pause();
        let block_counter = &self.block.arrivals[block_counter as usize];
        block_counter.set(block_counter.get() + 1);
        self.shared.bump(self.rank);
        block_counter.get() == callers
    }

    fn hand_to_last(
        &self,
        block_counter: BlockCounter,
        callers: u32,
        word: u64,
    ) -> Option<Self::Lanes<u64>> {
        self.block.handed[(self.number / self.blocks) as usize].set(word);
        let is_last = self.arrives_last(block_counter, callers);
        // The last arriver releases the writes of all.
        let mut writes = self.block.writes.borrow_mut();
        let own = &mut self.buffer.borrow_mut().writes;
        if !is_last {
            writes.append(own);
            return None;
        }
        own.append(&mut writes);
        Some(self.block.handed.each_ref().map(Cell::get))
    }

    fn lanes<T: Copy>(&self, mut each: impl FnMut(u32) -> T) -> Self::Lanes<T> {
        self.lanes_calls.set(self.lanes_calls.get() + 1);
        std::array::from_fn(|lane| each(lane as u32))
    }

    fn own<T: Copy>(&self, values: Self::Lanes<T>, lane: u32) -> T {
        values[lane as usize]
    }

    fn ballot(&self, values: Self::Lanes<bool>) -> u32 {
        self.lanes_differ.set(false);
        values
            .iter()
            .rev()
            .fold(0, |bits, &value| bits << 1 | u32::from(value))
    }

    fn broadcast(&self, values: Self::Lanes<u32>, lane: u32) -> u32 {
        self.lanes_differ.set(false);
        values[lane as usize]
    }

    fn shuffle(&self, values: Self::Lanes<u32>, lanes: Self::Lanes<u32>) -> Self::Lanes<u32> {
        lanes.map(|lane| values[lane as usize])
    }

    fn take_ticket(&self, counter: Counter) -> [u32; LANES as usize] {
        self.shared.note_work(self.rank);
        self.pause();
        let before = self.read_counter(counter);
        self.store_alone(counter, before + 1);
        let mut ticket = [u32::MAX; LANES as usize];
        ticket[0] = before as u32;
        ticket
    }

    fn leave(&self, counter: Counter, value: u64) {
        self.store_alone(counter, value);
    }

    fn deadline(&self) -> u64 {
        self.deadline
    }

    fn exclusive_sum(&self, values: Self::Lanes<u32>) -> (Self::Lanes<u32>, u32) {
        let mut sum = 0u32;
        let before = values.map(|value| {
            let before = sum;
            sum = sum.wrapping_add(value);
            before
        });
        (before, sum)
    }

    fn matching(&self, values: Self::Lanes<u32>) -> Self::Lanes<u32> {
        values.map(|value| self.ballot(values.map(|other| other == value)))
    }

    fn dot_bytes(&self, a: u32, b: u32, sum: u32) -> u32 {
        ferry_layout::dot_bytes(a, b, sum)
    }

    fn max(&self, values: Self::Lanes<u32>) -> u32 {
        values.into_iter().fold(0, u32::max)
    }

    fn union(&self, values: Self::Lanes<u64>) -> u64 {
        values.iter().fold(0, |bits, value| bits | value)
    }

    fn converge(&self) {
        self.lanes_differ.set(false);
    }

    fn read(&self, table: Table, index: u64) -> u32 {
        let address = self.in_table(table, 4 * index);
        match table {
            // Nobody writes these during a launch.
            Table::TopkIds | Table::TopkWeights => {
                self.with_memory(|memory| memory.read_u32(address))
            }
            _ => self.load_word(address),
        }
    }

    fn read_vector(&self, table: Table, index: u64) -> [u32; 4] {
        let at = self.in_table(table, 4 * index);
        assert!(at.is_multiple_of(16), "16 bytes at {at:#x}");
        std::array::from_fn(|word| self.read(table, index + word as u64))
    }

    fn write(&self, table: Table, index: u64, value: u32) {
        self.store_bytes(
            self.in_table(table, 4 * index),
            &value.to_le_bytes(),
            Polled::No,
        );
    }

    fn write_half(&self, table: Table, index: u64, value: u16) {
        self.store_bytes(
            self.in_table(table, 2 * index),
            &value.to_le_bytes(),
            Polled::No,
        );
    }

    fn increment(&self, table: Table, index: u64) {
        self.pause();
        let address = self.in_table(table, 4 * index);
        self.see(address, 4);
        let value = self.with_memory(|memory| memory.read_u32(address)) + 1;
        let mut memory = self.shared.memory.borrow_mut();
        let written = memory.write(address, &value.to_le_bytes());
        drop(memory);
        self.checked(written);
    }

    fn read_window(&self, at: ByteOffset) -> u32 {
        self.load_word(self.in_window(at.bytes()))
    }

    fn write_window(&self, at: ByteOffset, word: u32) {
        let address = self.in_window(at.bytes());
        self.store_bytes(address, &word.to_le_bytes(), Polled::No);
    }

    fn write_word(&self, to: Rank, at: ByteOffset, word: u32) {
        let address = self.row(Row::Inline(to, at)).start;
        self.store_bytes(address, &word.to_le_bytes(), Polled::Inline);
    }

    fn encode_row(&self, range: ByteRange, token: u32, targets: u64, to: impl Fn(u32) -> Row) {
        let shape = &self.common.shape;
        let token = self.encode_token(range, token);
        let scales = all_sent(&token.encoded.scales);
        let scales_start = shape.payload_bytes() + 4 * token.first_word;
        for target in (0..u64::BITS).filter(|target| targets >> target & 1 != 0) {
            let to = self.row(to(target));
            let (row, polled) = (to.start, to.polled);
            self.store_bytes(row + u64::from(range.start), &token.encoded.payload, polled);
            self.store_bytes(row + u64::from(scales_start), &scales, polled);
            if let Some(scale) = token.row_scale {
                let at = row + u64::from(shape.row_scale_start());
                self.store_bytes(at, &u32::from(scale).to_le_bytes(), Polled::No);
            }
            self.pause();
        }
    }

    fn encode_output(
        &self,
        range: ByteRange,
        token: u32,
        stride: u64,
        targets: u32,
        to: impl Fn(u32) -> OutputRow,
    ) {
        let token = self.encode_token(range, token);
        for target in (0..u32::BITS).filter(|target| targets >> target & 1 != 0) {
            let OutputRow { row, scales } = to(target);
            let payload = self.row(Row::Tensor(Tensor::Output, row)).start;
            self.store_bytes(
                payload + u64::from(range.start),
                &token.encoded.payload,
                Polled::No,
            );
            let words = token.encoded.scales.as_chunks().0;
            for (index, &word) in (u64::from(token.first_word)..).zip(words) {
                let index = u64::from(scales) + index * stride;
                self.write(Table::Scales, index, u32::from_le_bytes(word));
            }
            if let Some(scale) = token.row_scale {
                self.write_half(Table::RowScales, row.into(), scale);
            }
            self.pause();
        }
    }

    fn load_token(&self, part: TokenPart) {
        let before = self.loading.replace(Some(part));
        assert_eq!(before, None, "what was loaded is written");
    }

    fn write_loaded(
        &self,
        format: TokenFormat,
        part: TokenPart,
        next: Option<TokenPart>,
        stride: u64,
        targets: u32,
        to: impl Fn(u32) -> OutputRow,
    ) {
        let loaded = self.loading.replace(next);
        assert_eq!(loaded, Some(part), "what was loaded is written");
        self.write_token(format, part, stride, targets, to);
    }

    fn read_ahead(&self, range: ByteRange, from: Row) -> Self::Ahead {
        inline::load_first(self, range, from)
    }

    fn copy_row(
        &self,
        range: ByteRange,
        from: Row,
        ahead: Self::Ahead,
        targets: impl Bits,
        to: impl Fn(u32) -> Row,
    ) -> Result<(), TimedOut> {
        inline::copy(self, range, from, ahead, targets, to)
    }

    fn sum_rows(
        &self,
        range: ByteRange,
        sources: u32,
        from: impl Fn(u32) -> (Row, f32),
        to: Row,
        finish: impl Finish<Self>,
    ) {
        if range.start == range.end {
            return;
        }
        let (start, bytes) = (u64::from(range.start), u64::from(range.end - range.start));
        let mut sums = self.begin_sums(range, &finish);
        for source in (0..LANES).filter(|source| sources >> source & 1 != 0) {
            let (row, weight) = from(source);
            let data = self.load_bytes(self.row(row).start + start, bytes);
            for (sum, &bits) in sums.iter_mut().zip(data.as_chunks().0) {
                *sum += weight * f32_of_bf16_bits(u16::from_le_bytes(bits));
            }
            self.pause();
        }
        if !finish.is_rounding() {
            return self.finish_sums(range, &sums, to, &finish);
        }
        let bytes: Vec<u8> = sums
            .iter()
            .flat_map(|&sum| bf16_bits(sum).to_le_bytes())
            .collect();
        let to = self.row(to);
        self.store_bytes(to.start + start, &bytes, to.polled);
    }

    fn signal_all(&self, at: Signal, value: u64) {
        let (me, ranks) = (self.common.rank(), self.ranks());
        let is_mapped = |rank| self.common.shape.same_node(me, rank);
        let all = (0..ranks).map(Rank);
        all.clone()
            .filter(|rank| is_mapped(*rank))
            .for_each(|rank| self.signal(rank, at, value));
        self.release();
        for peer in all.filter(|rank| !is_mapped(*rank)) {
            if self.has_room() {
                let (from, to) = (at.place(), at.place());
                self.put_words(Put {
                    peer,
                    from,
                    to,
                    bytes: 8,
                });
            }
        }
    }

    fn record(&self, fault: &Fault) {
        let last_at = self.common.workspace + Counter::FaultRecord.bytes();
        let last = LastRecord(self.with_memory(|memory| memory.read_u64(last_at)));
        let page = self.common.fault_page;
        let acknowledged = page + offset_of!(FaultPage, acknowledged) as u64;
        let asked = || self.with_memory(|memory| memory.read_u64(acknowledged));
        let Some(number) = last.next(fault.kind as u64, asked) else {
            return;
        };
        let is_timeout = matches!(fault.kind, FaultKind::PeerTimeout | FaultKind::LocalTimeout);
        let patience = self.shared.patience.get().filter(|_| is_timeout);
        let patience_ms = patience.map(|patience| patience.as_millis() as u32);
        let fault = &Fault {
            patience_ms,
            ..*fault
        };
        let record = FaultPage::of(fault, number);
        let words = &bytemuck::bytes_of(&record)[..offset_of!(FaultPage, acknowledged)];
        let last = LastRecord::new(number, record.kind, record.culprit);
        let mut memory = self.shared.memory.borrow_mut();
        let written = memory.write(page, words);
        let kept = memory.write(last_at, &last.0.to_le_bytes());
        drop(memory);
        self.checked(written.and(kept));
    }
}
