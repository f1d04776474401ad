//! A round in the simulator, and with feature `cuda` on this machine's first GPU, if there is one.

#[cfg(feature = "cuda")]
use ferry::GroupOptions;
use ferry::{
    CombineBuffers, CombineInput, Communicator, Config, DispatchBuffers, DispatchInput, Error,
    Group, Plan, Stream,
};

/// Runs a round. Every token goes to experts 0 and 3 with weight 1, and experts return their input: the sum
/// is twice the token.
fn round(group: &Group) -> Result<bool, Error> {
    let plan = Plan::new(group, Config::new(4, 2, 64, 8))?;
    let mut ranks = Communicator::new(group, &plan)?;
    let one = 0x3f80_u16;
    let mut memory = Vec::new();
    for rank in &ranks {
        let device = rank.device();
        let x = device.upload_tensor([8, 64], &[one; 8 * 64])?;
        let topk_ids = device.upload_tensor([8, 2], &[0_i32, 3].repeat(8))?;
        let (rows, sums) = (
            DispatchBuffers::new(device, &plan)?,
            CombineBuffers::new(device, &plan)?,
        );
        memory.push((DispatchInput::new(x, topk_ids), rows, sums));
    }
    let stream = Stream::DEFAULT;
    for (rank, (input, rows, sums)) in ranks.iter_mut().zip(&memory) {
        rank.dispatch(stream, input, rows.output())?;
        rank.combine(
            stream,
            &CombineInput::new(rows.output().tokens()?),
            &sums.output(8)?,
        )?;
    }
    let mut right = true;
    for (rank, (_, _, sums)) in ranks.iter().zip(&memory) {
        let _ = rank.synchronize(stream)?;
        let sums: Vec<u16> = rank.device().download_tensor(&sums.output(8)?.rows())?;
        right &= sums == [0x4000; 8 * 64];
    }
    for rank in ranks {
        rank.close()?;
    }
    Ok(right)
}

fn main() {
    let right = Group::simulated(4, 7)
        .and_then(|group| round(&group))
        .expect("a simulated round");
    assert!(right, "a sum is wrong");
    println!("simulated: every sum is right");
    #[cfg(feature = "cuda")]
    match Group::local(&[0], &GroupOptions::default()).and_then(|group| round(&group)) {
        Ok(right) => assert!(right, "a sum of the GPU is wrong"),
        Err(error @ (Error::LibraryMissing { .. } | Error::Cuda(_))) => println!("cuda: {error}"),
        Err(error) => panic!("{error}"),
    }
}
