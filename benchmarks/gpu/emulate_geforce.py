import os,sys
sys.path[:0]=["src","."]
import torch,ctypes
from bough.bench import tuning as T
from bough.kernels.quant_matmul import cuda as C
from bough.kernels.quant_matmul.tiling import built_in_tilings as B
from bough.kernels.runtime import device as D,driver as V,nvrtc as N
d=torch.device("cuda",0);P=os.environ.get("BOUGH_PRETEND_CARD")
S=C.matmul_source()
M="mma(sums[m * TILES + first + n], a[m]"
def src(r):
 s=S.replace("u32 last = 0;","u32 last=0;float dd[4][4];UNROLL for(int q=0;q<16;q++)dd[0][q]=0.f;")
 for t in(", b[n].x, b[n].y);"," + 4, b[n].z, b[n].w);"):
  A=M+t
  assert A in s
  e="{"+A+"UNROLL for(int q=0;q<%d;q++)"%(r-1)+A.replace("sums[m * TILES + first + n]","dd[q]")+"}"
  s=s.replace(A,e)
 return s.replace("  return last;\n}","float z=0.f;UNROLL for(int q=0;q<16;q++)z+=dd[0][q];if(z==1.2345e30f)sums[0][0]+=1.f;return last;}",1)
if not P:
 k=S[S.index("DEVICE void mma"):S.index("DEVICE u32 word")]
 k="typedef unsigned u32;\n#define DEVICE __device__ __forceinline__\n"+k+'extern "C" __global__ void k(float*o,long long*t,int n){u32 a[4]={threadIdx.x,1,2,3};float c[8][4]={};long long s=clock64();for(int i=0;i<n;i++)for(int j=0;j<8;j++)mma(c[j],a,i,5);s=clock64()-s;float z=0;for(int j=0;j<32;j++)z+=c[0][j];o[threadIdx.x]=z;t[0]=s;}'
 m=V.Module(lambda:N.compile_cubin(k,defines={},arch="sm_90",cached=False),d)
 k2='extern "C" __global__ void d(float*o){extern __shared__ float x[];x[threadIdx.x]=o[threadIdx.x];__syncthreads();o[threadIdx.x]=x[9];}'
 m2=V.Module(lambda:N.compile_cubin(k2,defines={},arch="sm_90",cached=False),d)
 for z in(0,232448):
  try:K=m2.kernel("d",threads=64,shared=z);K((1,1),[torch.zeros(64,device=d)]);torch.cuda.synchronize();print("dyn",z,K.shared_bytes)
  except Exception as e:print(z,e)
 th=256
 if 1:
  o=torch.zeros(512,device=d);t=torch.zeros(1,dtype=torch.int64,device=d);K=m.kernel("k",threads=th)
  for _ in(1,2):
   a,b=[torch.cuda.Event(enable_timing=True)for _ in"ab"];a.record();K((132,1),[o,t,ctypes.c_int(100000)]);b.record();torch.cuda.synchronize()
  c=t.item();print("mma",th,"clk per mma per SMSP",c/(800000*th/128),"MHz",c/a.elapsed_time(b)/1e3,flush=True)
st=T.Stack(T.LAYERS_27B,d);n=sum(w.nbytes for s,_ in st._steps for w in s)
for r in map(int,sys.argv[1].split(",")):
 C.variant.cache_clear();C.matmul_source=lambda:src(r)if r>1 else S
 for b in(8,16,24,32):
  x=next(iter(st.measure([B(D.card_of(d).arch)[b]],b)))
  print(P,"R",r,"rows",b,"ms",round(x.seconds*1e3,4),"TB/s",round(n/x.seconds/1e12,3),flush=True)
os.system("nvidia-smi --query-gpu=clocks.sm,clocks.mem --format=csv,noheader")
