//! Words that a damaged peer may have written into a window: noise, and words of the right round with wrong
//! values.

use ferry_layout::{
    ByteOffset, DispatchRow, Epoch, Header, Rank, SENTINEL, Shape, Signal, Tagged, Window,
};

use ferry_rig::Dice;

/// A window's bytes, to be damaged.
pub struct Damage<'a> {
    /// Shape of the communicator.
    pub shape: &'a Shape,
    /// Layout of the window.
    pub window: Window,
    /// The round that is to be damaged.
    pub epoch: u64,
    /// Tokens of each rank in it.
    pub tokens: &'a [usize],
    /// Rows that the outputs hold.
    pub rows: u32,
    /// The window.
    pub bytes: &'a mut [u8],
    /// Decides what and where.
    pub dice: &'a mut Dice,
}

impl Damage<'_> {
    /// Damages it: some of the ways, or all of them with `fresh` words that say what the whole
    /// round waits for.
    pub fn run(&mut self, fresh: bool) {
        let ways = if fresh {
            0b1111
        } else {
            1 + self.dice.below(0b1111)
        };
        if ways & 1 != 0 {
            self.signals(fresh);
        }
        if ways & 2 != 0 {
            self.headers();
        }
        if ways & 4 != 0 {
            self.inline_rows();
        }
        if ways & 8 != 0 && !fresh {
            self.noise();
        }
    }

    /// Random words anywhere.
    fn noise(&mut self) {
        let words = self.bytes.len() / 4;
        for _ in 0..1 + self.dice.below(64) {
            let at = 4 * self.dice.below(words);
            let word = self.random();
            self.put(at as u64, &word.to_le_bytes());
        }
    }

    /// Signals of this round, with values that are mostly possible. Without `fresh` some of them.
    fn signals(&mut self, fresh: bool) {
        let window = self.window;
        let one_in = if fresh {
            1
        } else {
            self.dice.pick(&[1, 4, 32])
        };
        // Counts that fit: a round with others ends early.
        let mut left = self.rows as usize;
        for source in (0..self.shape.ranks).map(Rank) {
            let tokens = self.tokens[source.0 as usize] as u32;
            self.tagged(window.token_count(source), one_in, tokens, 100);
            for expert in 0..self.shape.local_experts() {
                let count = self.dice.below(3.min(left + 1));
                left -= count;
                self.tagged(window.count(source, expert), one_in, count as u32, 200);
                let row = self.dice.below(self.rows as usize + 1) as u32;
                self.tagged(window.source_base(source, expert), one_in, row, 50);
            }
            for word in 0..self.shape.presence_words() {
                let bits = self.random();
                self.tagged(window.presence(source, word), one_in, bits, 1000);
            }
            for unit in 0..self.shape.max_items() as u32 {
                self.flag(window.dispatch_flag(source, unit), one_in);
            }
            self.flag(window.credit(source), one_in);
        }
        for expert in 0..self.shape.local_experts() {
            let row = self.dice.below(self.rows as usize + 1) as u32;
            self.tagged(window.expert_base(expert), one_in, row, 30);
            let block = self.dice.below(self.shape.local_experts() as usize) as u32;
            self.tagged(window.expert_block_base(expert), one_in, block, 30);
        }
        for unit in 0..self.shape.max_items() as u32 {
            for slot in 0..self.shape.combine_slots() {
                self.flag(window.combine_flag(unit, slot), one_in);
            }
        }
    }

    /// Headers of all rows: experts of any rank and ordinals that are mostly possible, and any weight.
    fn headers(&mut self) {
        let (shape, window, row) = (self.shape, self.window, DispatchRow::of(self.shape));
        for source in (0..shape.ranks).map(Rank) {
            for token in 0..shape.max_tokens_per_rank {
                let at = window.dispatch_row(source, token).plus(row.header);
                self.header(at);
                if token >= shape.max_cut_tokens() || !shape.format().never_encodes_sentinel() {
                    continue;
                }
                for part in 0..shape.max_parts() {
                    let at = window.inline_dispatch_row(source, token);
                    self.header(at.plus(Header::of_part(row.header, shape.top_k, part)));
                }
            }
        }
    }

    fn header(&mut self, at: ByteOffset) {
        if self.dice.below(3) == 0 {
            return;
        }
        let (assignments, experts) = (self.shape.assignment_words(), self.shape.experts);
        for k in 0..self.shape.top_k {
            let word = match self.dice.below(8) {
                0 => self.random(),
                1 => {
                    assignments.encode(self.dice.below(experts as usize) as u32, self.edge() >> 16)
                }
                _ => {
                    let rank_in_expert = self.dice.below(4) as u32;
                    assignments.encode(self.dice.below(experts as usize) as u32, rank_in_expert)
                }
            };
            self.put(at.plus(Header::assignment(k)).bytes(), &word.to_le_bytes());
            let weight = self.random();
            let weight_at = at.plus(Header::weight(self.shape.top_k, k));
            self.put(weight_at.bytes(), &weight.to_le_bytes());
        }
    }

    /// Words of bare rows that have come, or not.
    fn inline_rows(&mut self) {
        let window = self.window;
        let one_in = self.dice.pick(&[1, 2, 64]);
        for at in (window.inline_start..window.inline_start + window.inline_bytes).step_by(4) {
            let held = self.word(at);
            if held == SENTINEL && self.dice.below(one_in) == 0 {
                let word = self.random();
                self.put(at, &word.to_le_bytes());
            }
        }
    }

    /// A word of this round: `value`, or once in so many times one that is not possible.
    fn tagged(&mut self, at: Signal, one_in: usize, value: u32, one_wrong_in: usize) {
        if self.dice.below(one_in) != 0 {
            return;
        }
        let value = match self.dice.below(one_wrong_in) {
            0 => self.edge(),
            _ => value,
        };
        let word = Tagged::new(Epoch(self.epoch), value).0;
        self.put(at.bytes(), &word.to_le_bytes());
    }

    /// A flag of this round, or of a later one.
    fn flag(&mut self, at: Signal, one_in: usize) {
        if self.dice.below(one_in) == 0 {
            let epoch = self
                .dice
                .pick(&[self.epoch, self.epoch, self.epoch + 1, u64::MAX]);
            self.put(at.bytes(), &epoch.to_le_bytes());
        }
    }

    /// A value that limits are missed by.
    fn edge(&mut self) -> u32 {
        let (rows, most) = (self.rows, self.shape.max_tokens_per_rank);
        let random = self.random();
        self.dice.pick(&[
            0,
            rows.wrapping_sub(1),
            rows,
            rows + 1,
            most,
            most + 1,
            1 << 24,
            1 << 25,
            1 << 31,
            u32::MAX - 127,
            u32::MAX,
            random,
            random >> 16,
        ])
    }

    fn random(&mut self) -> u32 {
        self.dice.below(1 << 32) as u32
    }

    fn word(&self, at: u64) -> u32 {
        let at = at as usize;
        self.bytes[at..at + 4]
            .iter()
            .rev()
            .fold(0, |word, &byte| word << 8 | u32::from(byte))
    }

    fn put(&mut self, at: u64, bytes: &[u8]) {
        let at = at as usize;
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }
}
